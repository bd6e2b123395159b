"""Mixtures of experts: what is theirs alone. `tests/contract` holds everything that they share with other models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_prune
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.cli.rendering import warning_lines
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.verify import verify
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.recipe_file import load_recipe
from ckpt_prune.planning.records import SiteRecord
from ckpt_prune.report.reading import report_of
from ckpt_prune.transform.settle import settle
from tests.contract.dense import Dense, spaces_recipe
from tests.contract.models import BLOCKS, Case
from tests.contract.open_experts import open_up
from tests.contract.whole import TARGETS, seen
from tests.encoders import STRENGTH
from tests.oracles import closed_forms, scores

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


def reported(out: Path) -> Sequence[SiteRecord]:
    """Sites of an output's report."""
    report = report_of(out)
    assert report is not None
    return report.sites


def expected_of(dense: Dense, block: int) -> tuple[list[int], np.ndarray]:
    """Columns that stay of the expert that sees nothing, and its last projection, from all tokens of the layer."""
    model: Any = ckpt_prune.load(dense.folder(ONE)).double()
    open_up(model, ONE.family)
    path = f"model.layers.{block}.mlp.experts.{UNSEEN}"
    expert: Any = model.get_submodule(path)
    # Before it is known which tokens are whose.
    gates = seen(model, ONE.samples(), inputs=[f"model.layers.{block}.mlp.gate"])
    tokens = torch.from_numpy(next(iter(gates.values()))).flatten(0, -2)
    with torch.no_grad():
        X = (expert.activation(expert.gate(tokens)) * expert.up(tokens)).numpy()
    W = expert.down.weight.detach().numpy()
    kept = scores.kept_units(scores.SCORES["corp"](W, X), 1, 22 - 6)
    strength = STRENGTH * float(np.mean(np.sum(X[:, kept] ** 2, axis=0)))
    return kept, closed_forms.ridge(W[:, kept], X[:, kept], X @ W.T, strength)[0]


@pytest.mark.parametrize("target", TARGETS)
def test_an_expert_without_tokens_takes_those_of_its_layer(lonely: Dense, target: Any, tmp_path: Path) -> None:
    wanted = spaces_recipe(ONE, {"mlp": "ridge"}, **TARGETS[target])
    lonely.prune(ONE, wanted, tmp_path / "out", None if target == "dense" else ONE.samples())
    sites = reported(tmp_path / "out")
    few = {(site.block, site.expert): site.few for site in sites if site.few is not None}
    assert few == {(block, expert): 0 for block in range(BLOCKS) for expert in (2, UNSEEN)}
    assert next(iter(warning_lines(sites))) == (
        "the router sent too few tokens to expert 2 of block 0 (0), 3 of block 0 (0), 2 of block 1 (0), "
        "3 of block 1 (0): they were measured on all tokens of their layer; use more samples"
    )
    kept, weight = expected_of(lonely, 0)
    (site,) = (site for site in sites if (site.block, site.expert) == (0, UNSEEN))
    assert site.kept == kept
    found = load_file(tmp_path / "out" / "model.safetensors")[f"model.layers.0.mlp.experts.{UNSEEN}.down_proj.weight"]
    np.testing.assert_allclose(found.numpy(), weight, atol=1e-4 * float(np.abs(weight).max()))


@pytest.mark.parametrize("name", ["best-uniform", "best"])
def test_what_chooses_by_effect_keeps_experts_alike(lonely: Dense, name: str, tmp_path: Path) -> None:
    """On folds, to the dense model's stream, from predicted errors."""
    recipe = load_recipe(name, ratio=0.3)
    lonely.prune(ONE, recipe, tmp_path / "out", ONE.samples())
    report = json.loads((tmp_path / "out" / "ckpt_prune.json").read_text())
    assert set(report["recipe"]["spaces"]) == {"heads", "mlp"}
    widths: dict[int, set[int]] = {}
    for site in report["sites"]:
        if site["space"] == "mlp":
            widths.setdefault(site["block"], set()).add(len(site["kept"]))
            assert site["share"] is None or 0 <= site["share"] <= 1
    assert all(len(own) == 1 for own in widths.values())
    if name == "best-uniform":
        (width,) = set.union(*widths.values())
        assert width < 22
    for check in verify(tmp_path / "out", lonely.folder(ONE)):
        assert check.passed or check.name == "sparsity", check


def refused(dense: Dense, recipe: Mapping[str, Any], case: Case = TWO) -> str:
    wanted = Recipe.model_validate({"version": 1, "name": "test", **recipe})
    with pytest.raises(UserError) as caught:
        settle(dense.request(case, wanted, case.samples()))
    return str(caught.value)


def test_what_experts_cannot_have_is_refused(tmp_path: Path) -> None:
    dense = Dense(tmp_path)
    affine = {"score": "corp", "compensation": {"method": "affine"}}
    assert refused(dense, {"spaces": {"mlp": affine}, "container": "any"}) == (
        "experts of a qwen3_moe have no biases: choose a compensation of mlp without one"
    )
    assert refused(dense, {"spaces": {"mlp": {"score": "taylor1"}}}) == (
        "recipe test ranks units by gradients of the loss, which are not gathered for experts: choose another score"
    )


def test_a_block_without_experts_is_refused(tmp_path: Path) -> None:
    case = Case("qwen3_moe", "Qwen3MoeForCausalLM", settings='{"mlp_only_layers": [1]}')
    with pytest.raises(UserError) as caught:
        Dense(tmp_path).model(case)
    assert str(caught.value) == (
        "qwen3_moe with mlp_only_layers [1] in config.json is not supported: some of its blocks have one mlp in place "
        "of experts"
    )


def test_a_plan_names_experts_and_is_applied(tmp_path: Path) -> None:
    dense = Dense(tmp_path)
    statistics = Statistics(dense.statistics(TWO).folder)
    options = {"statistics": statistics, "overrides": {"spaces.mlp.ratio": 0.5}, "recipe": "ridge"}
    plan = ckpt_prune.plan(dense.folder(TWO), **options).plan  # type: ignore[arg-type]
    places = [(site.block, site.space, site.expert) for site in plan.sites]
    experts = [("heads", None), *(("mlp", expert) for expert in range(4))]
    assert places == [(block, *own) for block in range(BLOCKS) for own in experts]
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert set(json.loads(plan.to_json())["recipe"]["spaces"]) == {"heads", "mlp"}
    ckpt_prune.prune(dense.folder(TWO), plan=tmp_path / "plan.json", statistics=statistics, output=tmp_path / "out")
    sites = {site.space: site for site in reported(tmp_path / "out")}
    assert len(sites["mlp"].kept) == 11
    assert json.loads((tmp_path / "out" / "config.json").read_text())["moe_intermediate_size"] == 11


def test_inspect_counts_the_columns_of_an_expert(tmp_path: Path) -> None:
    spaces = ckpt_prune.inspect(str(Dense(tmp_path).folder(TWO)), ratios=[0.5]).spaces
    assert list(spaces) == ["queries", "heads", "mlp"]
    mlp = spaces["mlp"]
    assert (mlp.unit, mlp.units, mlp.parameters) == ("column of each of 4 experts", 22, BLOCKS * 4 * 3 * 16 * 22)
    assert mlp.containers == {"weights": "qwen3_moe", "weights and bias": "remote code"}
