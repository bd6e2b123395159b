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
from tests.pairs import chosen

from .dense import Dense
from .models import FIRST, Case
from .whole import assert_same_outputs, outputs, plain

KEPT, COMPUTED = 2e-5, 2e-3


def hidden_recipe(kind: str, ratio: float, **more: Any) -> Recipe:
    target = "sequential" if kind == "per-block" else "dense"
    hidden = {"kind": kind, "multiple_of": 2, **more}
    return Recipe.model_validate({"version": 1, "name": "test", "ratio": ratio, "target": target, "hidden": hidden})


HEADS = {"falcon", "gpt2", "gpt_neox", "mpt", "opt"}
"""Families whose stock classes make heads as wide together as the stream is."""
SLOTLESS = {"gptj", "stablelm"}
"""Those without a slot for biases that their norms leave behind."""
KINDS = ["per-block", "shared"]


def refusal(case: Case, kind: str, *, sliced: bool = True) -> str | None:
    """How the reason begins for which a family is not sliced."""
    if case.family.residual is None or (kind == "shared" and case.family.head is None):
        return f"{case.model_type} keeps all dimensions of its residual stream"
    if kind == "shared" and sliced and case.model_type in HEADS:
        return f"the heads of {case.model_type} are always as wide together as the hidden size"
    return "no stock container fits: " if kind == "shared" and case.model_type in SLOTLESS else None


SLICED = [(case, kind) for kind in KINDS for case in FIRST if refusal(case, kind) is None]
WHOLE = {"llama", "opt", "mistral", "qwen2", "vit"}
PROJECTED = {"llama", "opt", "gpt2", "cohere2", "granite", "gemma"}
"""RMSNorms and LayerNorms with and without biases, Conv1D, attention beside the mlp, multipliers, offsets of gains."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", chosen(FIRST, lambda case: case.model_type in WHOLE), ids=str)
def test_nothing_sliced_keeps_the_outputs(dense: Dense, case: Case, kind: str, tmp_path) -> None:
    out, request = tmp_path / "out", dense.request(case, hidden_recipe(kind, 0.0), case.samples())
    reason = refusal(case, kind, sliced=False)
    if reason is not None:
        with pytest.raises(UserError) as caught:
            settle(request)
        assert str(caught.value).startswith(reason)
        return
    report = run(settle(request), out).report
    assert report.hidden is not None
    assert report.hidden.kept == report.hidden.dimensions
    assert report.container.remote_code is (kind == "per-block")
    other = case.samples(4, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(case.model(), other), KEPT)
    assert all(check.passed is not False for check in verify(out, dense.folder(case)))


@pytest.mark.parametrize(("case", "kind"), chosen(SLICED, lambda each: each[0].model_type in PROJECTED), ids=str)
def test_equals_the_dense_model_whose_stream_is_projected_by_hand(
    dense: Dense, case: Case, kind: str, tmp_path
) -> None:
    out, data = tmp_path / "out", case.samples()
    report = run(settle(dense.request(case, hidden_recipe(kind, 0.4), data)), out).report
    assert report.hidden is not None
    model = Model.open(dense.folder(case))
    own = Projected(plain(case.model()).double(), case, sublayers(model), report.hidden.kept)
    own.by_block(data) if kind == "per-block" else own.shared(data)
    other = case.samples(4, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(own.model, other), COMPUTED)
    assert torch.allclose(torch.tensor(report.hidden.energy), torch.tensor(own.energy), atol=1e-4)
