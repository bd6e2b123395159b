"""Masks of every linear module against a whole model, and recovery after them."""

import json
from pathlib import Path

import pytest
import torch

from ckpt_prune.job.job import Job, RecoverySamples
from ckpt_prune.model.model import Model as PrunedModel
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages.recovery.keys import recover_recipe
from ckpt_prune.verification.verify import verify
from tests.oracles.masked_model import Linear, Model, Target
from tests.pairs import first_of_each
from tests.stages.whole import RULES, TARGETS, assert_masked, make_recipe

from .dense import Dense, spaces_recipe
from .models import ALIKE, FIRST, LED, Case, unlike_cases
from .open_experts import open_up, paths_of
from .whole import plain


def runs() -> list[tuple[Case, str, Target]]:
    """Every family once; rules and targets two at a time over them."""
    rules = [rule for rule in RULES if "2:4" not in rule]
    targets = list(TARGETS)
    combinations = [(case, rules[i % len(rules)], targets[(i + i // len(rules)) % 3]) for i, case in enumerate(FIRST)]
    # Whose first block has no experts.
    return [*combinations, (LED, "sparsegpt", "by block")]


def whole(case: Case) -> Model:
    """The stock model as the oracle of masks sees it, from the family's own description of what reads what."""
    paths = paths_of(case.family)
    inputs = tuple(
        tuple(Linear(module, paths[module]) for module in readers) for readers in case.family.inputs.values()
    )
    model = plain(case.model())
    open_up(model, case.family)
    return Model(model, inputs, case.family.layers, case.family.block.replace("{block}", "{}"))


def stands_for(cell: tuple[Case, str, Target]) -> tuple[str, str]:
    """The family that has whatever parts its blocks have, and the settings of a config."""
    return ALIKE.get(cell[0].model_type, cell[0].model_type), cell[0].settings


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def name(value: object) -> str:
    return str(value).replace(" ", "-")


@pytest.mark.parametrize(("case", "rule", "target"), first_of_each(runs(), stands_for), ids=name)
def test_a_mask_equals_a_whole_model_masked_by_hand(dense: Dense, case: Case, rule: str, target: Target, tmp_path):
    data = case.samples(8)
    dense.prune(case, make_recipe(rule, target), tmp_path / "out", data)
    expected = whole(case).mask(data, RULES[rule][1], target)
    turned = {case.family.tensor(block, module) for block in range(case.blocks) for module in case.family.transposed}
    expected = {name: tensor.T if name in turned else tensor for name, tensor in expected.items()}
    assert_masked(tmp_path / "out", dense.folder(case), expected, case.family, updated="sparsegpt" in rule)
    for check in verify(tmp_path / "out", dense.folder(case)) if case.family.experts is not None else ():
        assert check.passed, check


@pytest.mark.parametrize("case", unlike_cases()[::8], ids=str)
def test_what_is_pruned_is_recovered(dense: Dense, case: Case, tmp_path) -> None:
    """The blocks that are trained come nearer to the dense ones on samples that they are not trained on."""
    dense.prune(case, spaces_recipe(case, dict.fromkeys(case.ratios, "none")), tmp_path / "pruned")
    settings = RecoverySettings.model_validate({"epochs": 3, "lr": 0.0005, "batch": 4, "held_out": 0.25})
    pruned = PrunedModel.open(tmp_path / "pruned")
    training = RecoverySamples(case.samples(16, seed=11), torch.float32)
    run_job(Job(pruned, recover_recipe(settings), dense=dense.model(case), training=training), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "ckpt_prune.json").read_text())
    layers = report["layers"]
    assert any(layer["mse_after"] < layer["mse_start"] for layer in layers)
    assert all(layer["mse_after"] <= layer["mse_start"] for layer in layers)
    for check in verify(tmp_path / "out"):
        assert check.passed or check.name == "sparsity", check
    assert torch.isfinite(torch.tensor([layer["mse_after"] for layer in layers])).all()


@pytest.mark.parametrize("case", unlike_cases()[::12], ids=str)
def test_what_is_pruned_is_scaled(dense: Dense, case: Case, tmp_path) -> None:
    """Nothing is held out: the losses reported are those of the training samples, and small steps lower them.

    Scales fitted as a step of the recipe are those of a later `recover`, to the last bit.
    """
    how, methods = {"epochs": 2, "batch": 16, "held_out": 0}, dict.fromkeys(case.ratios, "none")
    dense.prune(case, spaces_recipe(case, methods), tmp_path / "pruned")
    pruned, samples = PrunedModel.open(tmp_path / "pruned"), case.samples(16, seed=11)
    settings = RecoverySettings.model_validate({"method": "scales", **how})
    training = RecoverySamples(samples, torch.float32)
    job = Job(pruned, recover_recipe(settings), dense=dense.model(case), training=training)
    report = run_job(job, tmp_path / "out").report
    assert report.adapters is not None
    assert report.adapters.modules > 0
    assert report.adapters.loss_after < report.adapters.loss_before
    for check in verify(tmp_path / "out"):
        assert check.passed or check.name == "sparsity", check
    recipe = spaces_recipe(case, methods, recovery={"method": "scales", **how})
    at_once = dense.prune(case, recipe, tmp_path / "at-once", training=training)
    assert at_once["adapters"] | {"seconds": 0} == report.data()["adapters"] | {"seconds": 0}
    assert tensor_files(tmp_path / "at-once") == tensor_files(tmp_path / "out") != tensor_files(tmp_path / "pruned")
