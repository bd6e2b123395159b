"""Rotary pairs of every family that turns queries and keys by position: against whole models in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.verification.verify import verify
from tests.families import contents
from tests.pairs import every

from .dense import Dense, spaces_recipe
from .models import Case, first_cases
from .test_pruning import COMPUTED, KEPT
from .whole import TARGETS, Target, Whole, assert_same_outputs, outputs, wide

PAIRED = [case for case in first_cases() if case.family.rotary_spaces]
WHOLE_ROPE = {case.model_type: case for case in first_cases() if case.family.rope and not case.family.rotary_spaces}


def runs() -> list[tuple[Case, dict[str, str], Target]]:
    """Every family with factors, taking turns with targets and other spaces; three families without factors."""
    combinations: list[tuple[Case, dict[str, str], Target]] = []
    for turn, case in enumerate(PAIRED):
        others = [dict.fromkeys(case.values, "ridge"), {"heads": "affine"}, {}][turn % 3]
        combinations.append((case, {"rotary": "factors", **others}, list(TARGETS)[(turn + 1) % 3]))
        if turn < 3:
            combinations.append((case, {"rotary": "none", "heads": "none"}, list(TARGETS)[turn]))
    return combinations


def name(value: object) -> str:
    return "-".join(f"{s}={m}" for s, m in value.items()) if isinstance(value, dict) else str(value).replace(" ", "-")


@torch.inference_mode()
def generate(model: Any, ids: Tensor) -> tuple[Tensor, list[tuple[tuple[int, ...], ...]]]:
    """Logits read token by token through the cache, and the shapes of the keys and values in it."""
    name: Any = cache_argument(model.forward)
    cache, logits = None, []
    for token in ids.T:
        result = model(**{"input_ids": token[:, None], name: cache, "use_cache": True})
        cache = getattr(result, name)
        logits.append(result.logits)
    return torch.cat(logits, 1), [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers]


@pytest.mark.parametrize(("case", "methods", "target"), every(5, runs()), ids=name)
def test_equals_a_whole_model_pruned_by_hand(
    dense: Dense, case: Case, methods: dict[str, str], target: Target, tmp_path
) -> None:
    recipe, data = spaces_recipe(case, methods, **TARGETS[target]), case.samples()
    report = dense.prune(case, recipe, tmp_path / "out", None if target == "dense" else data)
    by_hand = Whole(case).prune(data, methods, target)
    assert {(site["block"], site["space"]): site["kept"] for site in report["sites"]} == by_hand.kept
    other = case.samples(6, seed=9)
    model = ckpt_prune.load(tmp_path / "out")
    results = outputs(model, other)
    assert_same_outputs(results, outputs(by_hand.model, other), COMPUTED if "factors" in methods.values() else KEPT)
    # Keys and values in the cache are as narrow as the projections, which eager attention reads as any other does.
    model.set_attn_implementation("eager")
    assert_same_outputs(outputs(model, other), results, 2e-6)
    ids = wide(other)["input_ids"]
    logits, shapes = generate(model, ids)
    assert_same_outputs({"logits": logits}, results, 2e-6)
    heads = case.kv_heads - ("heads" in methods)
    width = case.family.dimension(case.config, "head_dim")
    widths = 2 * (case.units("rotary") // 2), width - ("values" in methods) * (width // 2)
    assert {(*shape[:2], shape[3]) for layer in shapes for shape in layer} == {
        (len(ids), heads, size) for size in widths
    }
    assert all((keys[3], values[3]) == widths for keys, values in shapes)
    assert report["after"]["parameters"] == sum(p.numel() for p in model.parameters())
    for check in verify(tmp_path / "out", dense.folder(case)):
        assert check.passed or check.name == "sparsity", check


@pytest.mark.parametrize("model_type", sorted(WHOLE_ROPE))
def test_a_family_of_which_none_can_go_is_refused_by_name(dense: Dense, model_type: str) -> None:
    case = WHOLE_ROPE[model_type]
    with pytest.raises(UserError) as caught:
        prepare_plan(dense.request(case, spaces_recipe(PAIRED[0], {"rotary": "none"})))
    why = case.family.no_rotary
    assert why
    assert str(caught.value) == (
        f"recipe test prunes rotary, pairs of rotary positions, and in {model_type} none can go: {why}"
    )


@pytest.mark.parametrize("case", PAIRED[:2], ids=str)
def test_every_pair_kept_is_the_source_byte_for_byte(dense: Dense, case: Case, tmp_path) -> None:
    recipe = spaces_recipe(case, {"rotary": "factors"})
    spaces = {"rotary": recipe.spaces["rotary"].model_copy(update={"ratio": 0.0})}
    dense.prune(case, recipe.model_copy(update={"spaces": spaces}), tmp_path / "out")
    assert contents(dense.folder(case))["model.safetensors"] == contents(tmp_path / "out")["model.safetensors"]


def test_padded_pairs_load_with_the_stock_class(dense: Dense, tmp_path) -> None:
    case = next(candidate for candidate in PAIRED if candidate.model_type == "ernie4_5")
    recipe = spaces_recipe(case, {"rotary": "factors", "heads": "affine"}, "padded")
    dense.prune(case, recipe, tmp_path / "out")
    by_hand = Whole(case).prune(case.samples(), {"rotary": "factors", "heads": "affine"})
    other = case.samples(6, seed=9)
    model = ckpt_prune.load(tmp_path / "out")
    assert type(model).__name__ == case.architecture
    assert_same_outputs(outputs(model, other), outputs(by_hand.model, other), COMPUTED)


def test_costs_are_those_that_are_measured(dense: Dense, tmp_path) -> None:
    """Blocks of different widths, beside fewer query heads and columns."""
    case = next(candidate for candidate in PAIRED if candidate.model_type == "llama")
    methods = {"rotary": "factors", "queries": "ridge", "mlp": "ridge"}
    recipe = spaces_recipe(case, methods, layers="1:", widths="per_layer", target="sequential")
    cost = dense.prune(case, recipe, tmp_path / "out", case.samples())["after"]
    model = ckpt_prune.load(tmp_path / "out")
    model.set_attn_implementation("eager")
    ids = torch.zeros(1, cost["tokens"], dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    assert counter.get_total_flops() == cost["flops"]
    assert cost["parameters"] == sum(p.numel() for p in model.parameters())
    _, shapes = generate(model, ids)
    assert [keys[3] for keys, _ in shapes] == [case.units("rotary") * 2, case.units("rotary")]
