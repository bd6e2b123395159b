"""Records of a narrower residual stream."""

from ckpt_prune.common.records import FixedRecord
from ckpt_prune.job.records import HiddenRecord


class HiddenFields(FixedRecord):
    """The narrower residual stream; None if it is whole."""

    optional = frozenset({"hidden"})

    hidden: HiddenRecord | None = None
