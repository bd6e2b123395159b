"""Factors of every linear module against a whole model whose weights are replaced by hand."""

from pathlib import Path

import pytest
import torch

import ckpt_prune
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.factors import factor_names
from ckpt_prune.stages import FullRecipe
from ckpt_prune.verification.verify import verify
from tests.oracles import factors
from tests.oracles.masked_model import Target
from tests.pairs import dealt
from tests.stages.whole import TARGETS

from .dense import Dense
from .models import FIRST, Case
from .test_masks import whole
from .whole import wide

RATIO = 0.4


def in_one(case: Case) -> bool:
    """Whether transformers holds every linear of a block as one module, which two thin ones can stand in for."""
    return case.family.experts is None and all(len(paths) == 1 for paths in module_paths(case.family).values())


CELLS = dealt(filter(in_one, FIRST[::7]), list(TARGETS))
"""One family in seven: to look at all takes seconds while tests are collected."""


def product(W: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(factors.of_share(W.double().numpy(), X.numpy(), RATIO))


@pytest.mark.parametrize(("case", "target"), CELLS, ids=lambda value: str(value).replace(" ", "-"))
def test_factors_equal_a_whole_model_factored_by_hand(dense: Dense, case: Case, target: Target, tmp_path: Path):
    data = case.samples(8)
    values = {"version": 1, "name": "test", "low_rank": {}, "ratio": RATIO, **TARGETS[target]}
    dense.prune(case, FullRecipe.model_validate(values), tmp_path / "out", data)
    oracle = whole(case)
    expected = oracle.mask(data, product, target)
    out = Checkpoint.open(tmp_path / "out")
    for name, weight in expected.items():
        down, up = out.read(list(factor_names(name))).values()
        torch.testing.assert_close(up @ down, weight, rtol=0, atol=2e-4 * float(weight.abs().max()), msg=name)
    ours = ckpt_prune.load(str(tmp_path / "out")).double()
    with torch.no_grad():
        output, reference = (model.double()(**wide(data))[0] for model in (ours, oracle.model))
    torch.testing.assert_close(output, reference, rtol=0, atol=2e-3 * float(reference.abs().max()))
    for check in verify(tmp_path / "out", dense.folder(case)):
        assert check.passed or check.name == "sparsity", check


def test_what_is_several_modules_stays_whole(dense: Dense, tmp_path: Path):
    case = next(case for case in FIRST if case.family.experts is None and not in_one(case))
    report = dense.prune(case, FullRecipe.model_validate({"version": 1, "name": "x", "low_rank": {}}), tmp_path / "out")
    several = {module for module, paths in module_paths(case.family).items() if len(paths) > 1}
    named = {record["weight"].removesuffix(".weight").rpartition(".")[2] for record in report["factored"]}
    assert named
    assert not named & {module.rpartition(".")[2] for module in several}
    for check in verify(tmp_path / "out", dense.folder(case)):
        assert check.passed or check.name == "sparsity", check
