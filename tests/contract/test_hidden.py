"""Dimensions of the residual stream that go, in every family whose stream is described.

A stream that lies in fewer dimensions than the model has loses none of them: the outputs stay. One that does not is
projected, as the dense stock model is by hand (`tests/oracles/slicing.py`).
"""

from typing import Any

import pytest
import torch

import ckpt_prune
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.sublayers import sublayers
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.verify import verify
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.transform.run import run
from ckpt_prune.transform.settle import settle
from tests.oracles.slicing import Projected
from tests.pairs import chosen, every

from .dense import Dense
from .models import FIRST, Case, unlike_cases
from .whole import assert_same_outputs, outputs, plain

KEPT, COMPUTED = 2e-5, 2e-3


def hidden_recipe(kind: str, ratio: float, **more: Any) -> Recipe:
    target = "sequential" if kind == "per-block" else "dense"
    hidden = {"kind": kind, "multiple_of": 2, **more}
    return Recipe.model_validate({"version": 1, "name": "test", "ratio": ratio, "target": target, "hidden": hidden})


def described(case: Case) -> bool:
    return case.family.residual is not None


SLICED = [case for case in FIRST if described(case)]


@pytest.mark.parametrize("kind", ["per-block", "shared"])
@pytest.mark.parametrize("case", chosen(FIRST, unlike_cases().__contains__), ids=str)
def test_nothing_sliced_keeps_the_outputs(dense: Dense, case: Case, kind: str, tmp_path) -> None:
    out, request = tmp_path / "out", dense.request(case, hidden_recipe(kind, 0.0), case.samples())
    try:
        settled = settle(request)
    except UserError as error:
        assert not described(case) or kind == "shared", error
        assert str(error).startswith(
            (f"{case.model_type} keeps all dimensions", "the heads of ", "no stock container fits: ")
        ), error
        return
    report = run(settled, out).report
    assert report.hidden is not None
    assert report.hidden.kept == report.hidden.dimensions
    assert report.container.remote_code is (kind == "per-block")
    other = case.samples(4, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(case.model(), other), KEPT)
    assert all(check.passed is not False for check in verify(out, dense.folder(case)))


@pytest.mark.parametrize("kind", ["per-block", "shared"])
@pytest.mark.parametrize("case", every(2, SLICED), ids=str)
def test_equals_the_dense_model_whose_stream_is_projected_by_hand(
    dense: Dense, case: Case, kind: str, tmp_path
) -> None:
    out, data = tmp_path / "out", case.samples()
    request = dense.request(case, hidden_recipe(kind, 0.4), data)
    try:
        settled = settle(request)
    except UserError as error:
        assert kind == "shared", error
        return
    report = run(settled, out).report
    assert report.hidden is not None
    model = Model.open(dense.folder(case))
    own = Projected(plain(case.model()).double(), case, sublayers(model), report.hidden.kept)
    own.by_block(data) if kind == "per-block" else own.shared(data)
    other = case.samples(4, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(own.model, other), COMPUTED)
    assert torch.allclose(torch.tensor(report.hidden.energy), torch.tensor(own.energy), atol=1e-4)
