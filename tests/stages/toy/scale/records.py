"""The record of the stage `scale`."""

from ckpt_prune.common.records import FixedRecord


class ScaledWeight(FixedRecord):
    """A weight and what it was multiplied by."""

    weight: str
    factor: float
