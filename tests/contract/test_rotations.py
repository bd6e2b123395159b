"""Random rotations leave the function as it is, or the family says that it cannot be rotated."""

from typing import get_args

import pytest

import ckpt_prune
from ckpt_prune.errors import UserError
from ckpt_prune.planning.mask_recipe import RotationKind
from tests.transform.test_rotations import random_rotations, rotating

from .dense import Dense
from .models import CASES, Case
from .whole import assert_same_outputs, outputs

ROTATED = 2e-5
"""Share of the largest output that rounding what is absorbed to float32 leaves."""


@pytest.mark.parametrize("kind", get_args(RotationKind))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_rotations_keep_the_outputs(dense: Dense, case: Case, kind: str, tmp_path, monkeypatch) -> None:
    random_rotations(monkeypatch)
    turnable = case.family.residual is not None and case.family.unrotatable is None and case.family.head is not None
    if not (case.family.has_causal if kind == "values" else turnable):
        with pytest.raises(UserError, match=f"^{case.model_type} cannot be rotated"):
            dense.prune(case, rotating(kind, container="any"), tmp_path / "out")
        return
    dense.prune(case, rotating(kind, container="any"), tmp_path / "out")
    before = (dense.folder(case) / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before
    data = case.samples(6, seed=9)
    expected = outputs(ckpt_prune.load(dense.folder(case)), data)
    assert_same_outputs(outputs(ckpt_prune.load(tmp_path / "out"), data), expected, ROTATED)
