"""Record of the recovery of one block, for reports."""

import math
from typing import Annotated

from pydantic import BeforeValidator, Field

from ckpt_prune.common.records import Block, Count, Figure, FixedRecord


def _finite(value: float | None) -> float | None:
    return value if not isinstance(value, float) or math.isfinite(value) else None


# JSON has no infinity.
_Finite = Annotated[Figure, BeforeValidator(_finite)]


class RecoveredLayer(FixedRecord):
    """Recovery of one block, on held-out samples, against the dense model's hidden states after it.

    Figures are None where hidden states are not finite.

    Attributes:
        mse_before, cka_before: of the blocks as they were pruned, one after the other, none recovered. That is the
            pruned model itself, unless pruning looks at the recovered blocks before (on the fly, sequential).
        mse_start: of the block as it was pruned, behind recovered blocks.
        mse_after, cka_after: of the block as it is written, behind recovered blocks.
        epochs: run at all rates.
        best_epoch: its weights were kept; 0: the old ones.
        rate: the learning rate of the kept weights; None for the old ones.
        diverged: whether training diverged, at some rate.
        recovered: whether the block has new weights.
        curve: held-out error at the start and after every epoch at the last rate, as a share of the energy of the dense
            hidden states. Empty, and left out of JSON, if nothing was trained, and in files of earlier versions.
    """

    optional = frozenset({"curve"})

    block: Block
    mse_before: _Finite = None
    mse_start: _Finite = None
    mse_after: _Finite = None
    cka_before: _Finite = None
    cka_after: _Finite = None
    epochs: Count
    best_epoch: Count
    rate: Figure = None
    diverged: bool
    recovered: bool
    curve: list[_Finite] = Field(default_factory=list)
