"""Random rotations leave the function as it is, or the family says that it cannot be rotated."""

from typing import get_args

import pytest

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.skeleton import build_skeleton
from ckpt_prune.recipe.names import RotationKind
from tests.pairs import choose_cases, dealt
from tests.stages.test_rotations import random_rotations, rotating

from .dense import Dense
from .models import FIRST, Case, unlike_cases
from .whole import assert_same_outputs, outputs

ROTATED = 2e-5
"""Share of the largest output that rounding what is absorbed to float32 leaves."""


def slotless(case: Case) -> bool:
    """Whether linear modules that LayerNorms feed have no slot for their biases: remote code has."""
    assert case.family.residual is not None
    block = case.block(build_skeleton(case.config, case.architecture), 0)
    biased = (fed for norm, fed in case.family.residual.reads.items() if hasattr(block.get_submodule(norm), "bias"))
    return any(not case.family.bias_slots.get(module) for fed in biased for module in fed)


KINDS = get_args(RotationKind)
ALWAYS = dealt(unlike_cases(), KINDS)
CELLS = list(dict.fromkeys([*ALWAYS, *dealt(FIRST, KINDS)]))
"""Every family by one kind, in turns."""


@pytest.mark.parametrize(("case", "kind"), choose_cases(CELLS, ALWAYS.__contains__), ids=str)
def test_random_rotations_keep_the_outputs(dense: Dense, case: Case, kind: str, tmp_path, monkeypatch) -> None:
    random_rotations(monkeypatch)
    turnable = case.family.residual is not None and case.family.unrotatable is None and case.family.head is not None
    values = case.family.has_causal and not case.family.attention.latent
    if not (values if kind == "values" else turnable):
        with pytest.raises(UserError, match=f"^{case.model_type} cannot be rotated") as caught:
            dense.prune(case, rotating(kind), tmp_path / "out")
        remedy = "; rotation kind values leaves the stream as it is"
        assert str(caught.value).endswith(remedy) is (
            values and (case.family.unrotatable is not None or case.family.head is None)
        )
        return
    container = "any" if kind != "values" and slotless(case) else "auto"
    dense.prune(case, rotating(kind, container=container), tmp_path / "out")
    before = (dense.folder(case) / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before
    data = case.samples(6, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(tmp_path / "out"), data), outputs(case.model(), data), ROTATED)
