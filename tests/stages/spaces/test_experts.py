"""Mixtures of experts: what is theirs alone. `tests/contract` holds everything that they share with other models."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.records import SiteRecord
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.scoring.expert_scores import EXPERT_SCORES
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.report import find_report
from ckpt_prune.stages.spaces.pruner import SWEEPS
from ckpt_prune.stages.spaces.show import warn_of_sites
from ckpt_prune.verification.verify import verify
from tests.contract.dense import Dense, spaces_recipe
from tests.contract.models import BLOCKS, LED, Case, first_cases
from tests.contract.open_experts import open_up
from tests.contract.whole import TARGETS, outputs, record_states
from tests.encoders import STRENGTH
from tests.oracles import closed_forms, scores
from tests.pairs import choose_cases, dealt, one_of
from tests.refusals import refusal

ONE = Case("qwen3_moe", "Qwen3MoeForCausalLM", settings='{"num_experts_per_tok": 1}')
"""Every token goes to one of four experts."""
TWO = Case("qwen3_moe", "Qwen3MoeForCausalLM")
UNSEEN = 3


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    """A model of which two experts never see a token: those of logits x and -x are always before those of 0."""
    dense = Dense(tmp_path_factory.mktemp("lonely"))
    path = dense.folder(ONE) / "model.safetensors"
    tensors = load_file(path)
    for block in range(BLOCKS):
        router = tensors[f"model.layers.{block}.mlp.gate.weight"]
        router[1], router[2:] = -router[0], 0
    save_file(tensors, path, {"format": "pt"})
    return dense


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    """Dense models, each with statistics that are measured once."""
    return Dense(tmp_path_factory.mktemp("dense"))


def read_sites(out: Path) -> Sequence[SiteRecord]:
    """Sites of an output's report."""
    report = find_report(out)
    assert report is not None
    return report.sites


def expected_of(dense: Dense, block: int) -> tuple[list[int], np.ndarray]:
    """Columns that stay of the expert that sees nothing, and its last projection, from all tokens of the layer."""
    model: Any = ckpt_prune.load(dense.folder(ONE)).double()
    open_up(model, ONE.family)
    path = f"model.layers.{block}.mlp.experts.{UNSEEN}"
    expert: Any = model.get_submodule(path)
    # Before it is known which tokens are whose.
    gates = record_states(model, ONE.samples(), inputs=[f"model.layers.{block}.mlp.gate"])
    tokens = torch.from_numpy(next(iter(gates.values()))).flatten(0, -2)
    with torch.no_grad():
        X = (expert.activation(expert.gate(tokens)) * expert.up(tokens)).numpy()
    W = expert.down.weight.detach().numpy()
    kept = scores.kept_units(scores.SCORES["corp"](W, X), 1, 22 - 6)
    strength = STRENGTH * float(np.mean(np.sum(X[:, kept] ** 2, axis=0)))
    return kept, closed_forms.ridge(W[:, kept], X[:, kept], X @ W.T, strength)[0]


@pytest.mark.parametrize("target", TARGETS)
def test_an_expert_without_tokens_takes_those_of_its_layer(lonely: Dense, target: Any, tmp_path: Path) -> None:
    recipe = spaces_recipe(ONE, {"mlp": "ridge"}, **TARGETS[target])
    lonely.prune(ONE, recipe, tmp_path / "out", None if target == "dense" else ONE.samples())
    sites = read_sites(tmp_path / "out")
    few = {(site.block, site.expert): site.few for site in sites if site.few is not None}
    assert few == {(block, expert): 0 for block in range(BLOCKS) for expert in (2, UNSEEN)}
    assert next(iter(warn_of_sites(sites))) == (
        "The router sent too few tokens to expert 2 of block 0 (0), 3 of block 0 (0), 2 of block 1 (0), "
        "3 of block 1 (0): they were measured on all tokens of their layer; use more samples."
    )
    kept, weight = expected_of(lonely, 0)
    (site,) = (site for site in sites if (site.block, site.expert) == (0, UNSEEN))
    assert site.kept == kept
    refitted = load_file(tmp_path / "out" / "model.safetensors")[
        f"model.layers.0.mlp.experts.{UNSEEN}.down_proj.weight"
    ]
    np.testing.assert_allclose(refitted.numpy(), weight, atol=1e-4 * float(np.abs(weight).max()))


def test_what_chooses_by_effect_keeps_experts_alike(lonely: Dense, tmp_path: Path) -> None:
    """On folds, to the dense model's stream, from predicted errors."""
    recipe = load_recipe("best-uniform", ratio=0.3).at_its_size
    lonely.prune(ONE, recipe, tmp_path / "out", ONE.samples())
    report = json.loads((tmp_path / "out" / "ckpt_prune.json").read_text())
    assert set(report["recipe"]["spaces"]) == {"heads", "mlp"}
    widths: dict[int, set[int]] = {}
    for site in report["sites"]:
        if site["space"] == "mlp":
            widths.setdefault(site["block"], set()).add(len(site["kept"]))
            assert site["share"] is None or 0 <= site["share"] <= 1
    assert all(len(sizes) == 1 for sizes in widths.values())
    (width,) = set.union(*widths.values())
    assert width < 22
    for check in verify(tmp_path / "out", lonely.folder(ONE)):
        assert check.passed or check.name == "sparsity", check


# ---- whole experts -------------------------------------------------------------------------------------------------

AFFINE = {"compensation": {"method": "affine"}}
WHOLE = [case for case in first_cases() if case.family.experts is not None]
KEEP = 3


@torch.no_grad()
def rank_experts(case: Case, score: str) -> dict[int, list[int]]:
    """Block → the experts that stay, from what every token of the stock model is given."""
    model: Any = case.model().double()
    assert case.family.experts is not None
    ranked = {}
    called: dict[int, Any] = {}
    for block in range(BLOCKS):
        stacked = model.get_submodule(f"{case.family.layers}.{block}.{case.family.experts.module}")
        stacked.register_forward_pre_hook(lambda _, args, block=block: called.__setitem__(block, args))
    outputs(model, case.samples())
    for block, (tokens, places, weights) in called.items():
        stacked = model.get_submodule(f"{case.family.layers}.{block}.{case.family.experts.module}")
        values = []
        for expert in range(4):
            norms, shares = [], []
            for token, chosen, given in zip(tokens, places.tolist(), weights, strict=True):
                if expert in chosen:
                    gate, up = (stacked.gate_up_proj[expert] @ token).chunk(2)
                    y = stacked.down_proj[expert] @ (stacked.act_fn(gate) * up)
                    norms.append(float(given[chosen.index(expert)].double() * y.norm()))
                    shares.append(norms[-1] / float(given.double().sum()))
            by_score = {"routed-energy": np.square(norms).sum(), "frequency": len(norms), "reap": np.mean(norms)}
            by_score["reap-renormalised"] = np.mean(shares)
            values.append(by_score[score])
        ranked[block] = sorted(np.argsort(values)[-KEEP:].tolist())
    return ranked


def smaller(case: Case, kept: Mapping[int, list[int]]) -> Any:
    """The stock class of so many experts, with the weights of those that stay."""
    (key,) = case.family.dimensions["experts"]
    dense = case.model()
    config = AutoConfig.for_model(**case.config.to_dict())
    setattr(config, key, KEEP)
    model: Any = type(dense)(config)
    values = dict(dense.state_dict())
    for name, tensor in values.items():
        if ".experts." in name or name.endswith(("mlp.gate.weight", "router.weight", "e_score_correction_bias")):
            values[name] = tensor[kept[int(name.split(".")[2])]]
    model.load_state_dict(values)
    return model.eval()


@pytest.mark.parametrize(
    ("case", "score"),
    one_of(4, list(zip(WHOLE, itertools.cycle(EXPERT_SCORES), strict=False))),
    ids=str,
)
def test_whole_experts_go_with_their_rows_of_the_router(dense: Dense, case: Case, score: str, tmp_path: Path) -> None:
    values = {"version": 1, "name": "test", "ratio": 0.25, "spaces": {"experts": {"score": score}}}
    live = None if score == "frequency" else case.samples()
    dense.prune(case, FullRecipe.model_validate(values), tmp_path / "out", live)
    kept = {site.block: site.kept for site in read_sites(tmp_path / "out")}
    assert kept == rank_experts(case, score)
    other = case.samples(6, seed=9)
    results, expected = outputs(ckpt_prune.load(tmp_path / "out"), other), outputs(smaller(case, kept), other)
    torch.testing.assert_close(results["logits"], expected["logits"], rtol=1e-9, atol=1e-9)
    for check in verify(tmp_path / "out", dense.folder(case)):
        assert check.passed or check.name == "sparsity", check


@torch.no_grad()
def refit_by_hand(case: Case, kept: Mapping[int, list[int]], target: str) -> Any:
    """The stock class of the experts that stay, its last projections fitted token by token, one after the other."""
    model, dense = smaller(case, kept).double(), case.model().double()
    family, data = case.family, case.samples()
    assert family.experts is not None
    multiplier = float(getattr(case.config, "residual_multiplier", 1.0))
    layers = model.get_submodule(family.layers)
    for block in range(BLOCKS):
        path = f"{family.layers}.{block}"
        ours = layers[block]
        if target == "sequential":
            layers[block] = dense.get_submodule(path)
        reached = output_of(model if target == "sequential" else dense, path, data)
        layers[block] = ours
        stacked = ours.get_submodule(family.experts.module)
        called: list[Any] = []
        hook = stacked.register_forward_pre_hook(lambda _, args, called=called: called.append(args))
        for _ in range(SWEEPS):
            called.clear()
            lacking = (reached - output_of(model, path, data)) / multiplier
            ((tokens, places, weights),) = called
            for expert in range(KEEP):
                at, place = torch.where(places == expert)
                gate, up = (tokens[at] @ stacked.gate_up_proj[expert].T).chunk(2, -1)
                X = (stacked.act_fn(gate) * up * weights[at, place, None]).numpy()
                W = stacked.down_proj[expert].clone().numpy()
                Y = X @ W.T + lacking[at].numpy() / places.shape[1]
                strength = STRENGTH * float(np.mean(np.sum(X**2, axis=0)))
                stacked.down_proj[expert] = torch.from_numpy(closed_forms.ridge(W, X, Y, strength)[0])
        hook.remove()
    return model


def output_of(model: Any, path: str, data: Any) -> torch.Tensor:
    """Return a block's outputs for all tokens, (tokens, hidden)."""
    results: list[Any] = []
    hook = model.get_submodule(path).register_forward_hook(lambda _, __, output: results.append(output))
    outputs(model, data)
    hook.remove()
    return torch.cat([result[0] if isinstance(result, tuple) else result for result in results]).flatten(0, -2).double()


MADE_UP = list(zip(WHOLE, itertools.cycle(["drift", "sequential"]), strict=False))


# One with a number that multiplies what experts give, and one with shared experts.
@pytest.mark.parametrize(
    ("case", "target"),
    choose_cases(MADE_UP, lambda pair: pair[0].model_type in ("granitemoe", "deepseek_v3")),
    ids=str,
)
def test_experts_that_stay_make_up_for_those_that_go(dense: Dense, case: Case, target: str, tmp_path: Path) -> None:
    compensation = {"method": "ridge", "lambda": STRENGTH}
    spaces = {"experts": {"score": "routed-energy", "compensation": compensation}}
    values = {"version": 1, "name": "test", "ratio": 0.25, "target": target, "spaces": spaces}
    dense.prune(case, FullRecipe.model_validate(values), tmp_path / "out", case.samples())
    sites = read_sites(tmp_path / "out")
    kept = {site.block: site.kept for site in sites}
    other = case.samples(6, seed=9)
    logits = outputs(ckpt_prune.load(tmp_path / "out"), other)["logits"]
    by_hand = refit_by_hand(case, kept, target)
    expected = outputs(by_hand, other)["logits"].float()
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=5e-4 * float(expected.abs().max()))
    bare = outputs(smaller(case, kept), other)["logits"].float()
    assert (bare - expected).abs().max() > 1e-2 * expected.abs().max()
    for site in sites:
        assert (site.method, site.strength) == ("ridge", STRENGTH)
        assert site.error_compensated < site.error_uncompensated  # type: ignore[operator]
    checks = {check.name: check for check in verify(tmp_path / "out", dense.folder(case))}
    assert all(check.passed for name, check in checks.items() if name != "sparsity"), checks
    assert checks["kept units"].detail.endswith(
        "; last projections of the experts of 2 blocks are refitted and not compared"
    )


def test_verify_sees_an_expert_that_is_another(dense: Dense, tmp_path: Path) -> None:
    values = {"version": 1, "name": "test", "ratio": 0.25, "spaces": {"experts": {"score": "frequency"}}}
    dense.prune(TWO, FullRecipe.model_validate(values), tmp_path / "out", TWO.samples())
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (0, 1)]
    tensors |= {names[0]: tensors[names[1]], names[1]: tensors[names[0]]}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    failed = [check for check in verify(tmp_path / "out", dense.folder(TWO)) if not check.passed]
    assert any(f"{names[0]} is not the dense model's" in check.detail for check in failed)


def test_what_whole_experts_cannot_have_is_refused(dense: Dense) -> None:
    experts = {"experts": {"score": "reap"}}
    assert refusal_of(dense, {"ratio": 0.75, "spaces": experts}) == (
        "1 of 4 experts would stay, and the router sends every token to 2 (num_experts_per_tok in config.json): keep "
        "as many"
    )
    with pytest.raises(ValidationError, match="for both, prune twice, whole experts first"):
        FullRecipe.model_validate({"version": 1, "name": "test", "spaces": experts | {"mlp": {"score": "flap"}}})
    fitted = {"experts": {"score": "reap", "compensation": {"method": "ridge"}}}
    with pytest.raises(ValidationError, match="on the tokens that reach them once others are gone: say target: seq"):
        FullRecipe.model_validate({"version": 1, "name": "test", "spaces": fitted})
    with pytest.raises(ValidationError, match="method affine is not for this space; allowed here: none, ridge"):
        FullRecipe.model_validate({"version": 1, "name": "t", "spaces": {"experts": {**fitted["experts"], **AFFINE}}})
    later = {"version": 1, "name": "test", "target": "sequential", "spaces": fitted}
    with pytest.raises(UserError) as caught:
        prepare_plan(dense.request(TWO, FullRecipe.model_validate(later)))
    assert str(caught.value) == (
        "recipe test refits experts on the tokens that reach them once others are gone, which statistics of the dense "
        "model do not tell: give --text instead of --statistics, or say --set spaces.experts.compensation.method=none"
    )
    bare: dict[str, Any] = {"method": "ridge", "lambda": 0}
    few = {**later, "ratio": 0.25, "spaces": {"experts": {"score": "reap", "compensation": bare}}}
    assert refusal(prepare_plan, dense.request(TWO, FullRecipe.model_validate(few), TWO.samples(2))) == (
        "ridge with lambda 0 needs at least 3 windows of 12 tokens for the 22 inputs of the last projection of each of "
        "3 experts, and there are 2: give more, or a lambda above 0"
    )
    with pytest.raises(ValidationError, match="every block keeps as many experts as the next: allocation: uniform"):
        FullRecipe.model_validate({"version": 1, "name": "test", "spaces": experts, "allocation": "least-error"})


GROUPED = {"first_k_dense_replace": 0, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
BY_BEST = Case(
    "deepseek_v2", "DeepseekV2ForCausalLM", settings=json.dumps(GROUPED | {"topk_method": "group_limited_greedy"})
)
BY_TWO_BEST = Case("deepseek_v3", "DeepseekV3ForCausalLM", settings=json.dumps(GROUPED))


@torch.no_grad()
def route_tokens(model: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the first router gives for every token: scores it chooses by (tokens, experts), and its experts."""
    calls: list[Any] = []
    router = model.double().get_submodule("model.layers.0.mlp.gate")
    router.register_forward_hook(lambda *seen: calls.append(seen[2]))
    outputs(model, case.samples(24, seed=9))
    logits, places = (torch.cat([call[part] for call in calls]) for part in (0, 2))
    if case is BY_BEST:
        return logits.softmax(-1), places
    return logits.sigmoid() + router.e_score_correction_bias, places


# A third of the experts of four in a group is no whole number: it is rounded to one of four.
@pytest.mark.parametrize(("case", "score"), dealt([BY_BEST, BY_TWO_BEST], ["frequency", "reap"]), ids=str)
def test_tokens_that_lose_nothing_stay_with_their_experts(case: Case, score: str, tmp_path: Path) -> None:
    moved = stayed = 0
    for seed in range(2):
        dense, out = Dense(tmp_path / str(seed)), tmp_path / f"out-{seed}"
        dense.root.mkdir()
        path = dense.folder(case) / "model.safetensors"
        tensors, router = load_file(path), "model.layers.0.mlp.gate.weight"
        tensors[router] = torch.randn(tensors[router].shape, generator=torch.Generator().manual_seed(seed))
        save_file(tensors, path, {"format": "pt"})
        dense.prune(case, experts_recipe(score, 0.33), out, case.samples())
        kept = torch.tensor(read_sites(out)[0].kept)
        assert [int((kept // 4 == group).sum()) for group in range(4)] == [3] * 4
        values, before = route_tokens(ckpt_prune.load(dense.folder(case)), case)
        after = kept[route_tokens(ckpt_prune.load(out), case)[1]]
        loses = ~torch.isin(before, kept).all(1)
        if case is BY_TWO_BEST:  # its groups are rated by experts that a token need not be sent to
            best = values.view(-1, 4, 4).topk(2)
            entered = best.values.sum(2).topk(2).indices
            complete = torch.isin(best.indices + 4 * torch.arange(4)[:, None], kept).all(2)
            loses |= ~complete.gather(1, entered).all(1)
        same = (before.sort().values == after.sort().values).all(1)
        moved, stayed = moved + int((~same & ~loses).sum()), stayed + int((~loses).sum())
    assert moved == 0
    assert stayed > 100


def test_a_plan_that_moves_experts_to_other_groups_is_refused(tmp_path: Path) -> None:
    dense = Dense(tmp_path)
    folder, statistics = dense.folder(BY_TWO_BEST), dense.statistics(BY_TWO_BEST)
    options: dict[str, Any] = {"recipe": "expert-frequency", "statistics": statistics}
    plan = ckpt_prune.plan(folder, **options).plan
    plan.sites[0].kept[:] = range(12)
    with pytest.raises(UserError, match="keeps different numbers of units of experts side by side in block 0"):
        ckpt_prune.prune(folder, plan=plan, statistics=statistics, output=tmp_path / "out", dry_run=True)


def experts_recipe(score: str, ratio: float) -> FullRecipe:
    spaces = {"experts": {"score": score, "ratio": ratio}}
    return FullRecipe.model_validate({"version": 1, "name": "test", "spaces": spaces})


def test_experts_and_shared_ones_keep_one_width(dense: Dense) -> None:
    spaces = {"mlp": {"score": "magnitude"}, "shared": {"score": "magnitude", "ratio": 0.5}}
    assert refusal_of(dense, {"ratio": 0.25, "spaces": spaces}, LED) == (
        "one key of config.json (moe_intermediate_size) says how wide mlp and shared of a deepseek_v3 are, and 16 of "
        "mlp and 11 of shared would stay: say allocation: least-error, or the same ratio and rounding for both"
    )


def test_heads_that_must_divide_the_hidden_size_go_by_steps(dense: Dense) -> None:
    """The hidden size is 16. deepseek_v2 then takes 4, 2 or 1 heads, and deepseek_v3 takes any number."""
    steps = {case.model_type: dense.model(case).stock_step("heads") for case in (BY_BEST, BY_TWO_BEST)}
    assert steps == {"deepseek_v2": 2, "deepseek_v3": 1}


def refusal_of(dense: Dense, recipe: Mapping[str, Any], case: Case = TWO) -> str:
    full_recipe = FullRecipe.model_validate({"version": 1, "name": "test", **recipe})
    return refusal(prepare_plan, dense.request(case, full_recipe, case.samples()))


def test_what_experts_cannot_have_is_refused(tmp_path: Path) -> None:
    dense = Dense(tmp_path)
    affine = {"score": "corp", "compensation": {"method": "affine"}}
    assert refusal_of(dense, {"spaces": {"mlp": affine}, "container": "any"}) == (
        "experts of a qwen3_moe have no biases: choose a compensation of mlp without one"
    )
    assert refusal_of(dense, {"spaces": {"mlp": {"score": "taylor1"}}}) == (
        "recipe test ranks units by gradients of the loss, which are not gathered for experts: choose another score"
    )


# One whose router has another name in memory.
@pytest.mark.parametrize("case", choose_cases(WHOLE, lambda case: case.model_type == "mixtral"), ids=str)
def test_experts_as_they_are_in_memory(case: Case, tmp_path: Path) -> None:
    """transformers loads and saves them so, too. The output is stored as the input is."""
    hub, memory = Dense(tmp_path / "hub"), Dense(tmp_path / "memory")
    for dense in (hub, memory):
        dense.root.mkdir()
    case.model().save_pretrained(memory.folder(case), save_original_format=False)
    stored = load_file(memory.folder(case) / "model.safetensors")
    assert stored.keys() == case.model().state_dict().keys()
    recipe = {"version": 1, "name": "test", "ratio": 0.25, "spaces": {"experts": {"score": "reap"}}}
    columns = spaces_recipe(case, {"mlp": "ridge"})
    for kind, full_recipe in {"experts": FullRecipe.model_validate(recipe), "columns": columns}.items():
        for dense in (hub, memory):
            dense.prune(case, full_recipe, dense.root / kind)
            for check in verify(dense.root / kind, dense.folder(case)):
                assert check.passed or check.name == "sparsity", check
        ours, theirs = (ckpt_prune.load(dense.root / kind).state_dict() for dense in (memory, hub))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert load_file(memory.root / kind / "model.safetensors").keys() == stored.keys()
        assert load_file(hub.root / kind / "model.safetensors").keys() != stored.keys()


def test_a_plan_names_experts_and_is_applied(tmp_path: Path) -> None:
    dense = Dense(tmp_path)
    statistics = Statistics(dense.statistics(TWO).folder)
    options = {"statistics": statistics, "overrides": {"spaces.mlp.ratio": 0.5}, "recipe": "ridge"}
    plan = ckpt_prune.plan(dense.folder(TWO), **options).plan  # type: ignore[arg-type]
    places = [(site.block, site.space, site.expert) for site in plan.sites]
    experts = [("heads", None), *(("mlp", expert) for expert in range(4))]
    assert places == [(block, *expert_place) for block in range(BLOCKS) for expert_place in experts]
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert set(json.loads(plan.to_json())["recipe"]["spaces"]) == {"heads", "mlp"}
    ckpt_prune.prune(dense.folder(TWO), plan=tmp_path / "plan.json", statistics=statistics, output=tmp_path / "out")
    sites = {site.space: site for site in read_sites(tmp_path / "out")}
    assert len(sites["mlp"].kept) == 11
    assert json.loads((tmp_path / "out" / "config.json").read_text())["moe_intermediate_size"] == 11
    # The default implementation of transformers runs no such width.
    assert (
        "Experts of 11 columns do not run by transformers' default, which wants a multiple of 8: say --set "
        'spaces.mlp.multiple_of=8, or load them by ckpt_prune.load or with experts_implementation="eager".'
    ) in list(warn_of_sites(read_sites(tmp_path / "out")))
    with torch.no_grad():
        logits = ckpt_prune.load(tmp_path / "out")(torch.arange(3, 12)[None]).logits
    assert torch.isfinite(logits).all()


WIDE = {"moe_intermediate_size": 40, "first_k_dense_replace": 0}
WAYS: dict[str, dict[str, Any]] = {
    "ratio": {"ratio": 0.3},
    "size": {"size": {"params": "82%"}},
    "error": {"allocation": "least-error", "weigh_by": "energy", "size": {"params": "82%"}},
}
WIDTHS = [("qwen3_moe", way) for way in WAYS] + [("deepseek_v3", "ratio"), ("deepseek_v3", "size")]


# Of 40 columns a ratio of 0.3 leaves 28, which torch multiplies in no 16-bit type.
@pytest.mark.parametrize(("model_type", "way"), one_of(3, WIDTHS))
def test_experts_run_by_the_default_of_transformers(model_type: str, way: str, tmp_path: Path) -> None:
    dense, case = Dense(tmp_path), next(candidate for candidate in WHOLE if candidate.model_type == model_type)
    case = replace(case, settings=json.dumps(WIDE))
    spaces = {name: {"score": "corp"} for name in ("mlp", "shared") if name == "mlp" or model_type == "deepseek_v3"}
    recipe = FullRecipe.model_validate({"version": 1, "name": "test", "spaces": spaces, **WAYS[way]})
    dense.prune(case, recipe, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["moe_intermediate_size"] in (24, 32)
    assert not any("do not run" in line for line in warn_of_sites(read_sites(tmp_path / "out")))
    for dtype in (torch.float32, torch.bfloat16):
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
        assert stock.config._experts_implementation == "grouped_mm"
        with torch.no_grad():
            assert torch.isfinite(stock(torch.arange(3, 12)[None]).logits).all()
