"""Records of whole blocks that are gone."""

from ckpt_prune.common.records import FixedRecord
from ckpt_prune.job.records import DepthRecord


class DepthFields(FixedRecord):
    """Which blocks are gone; all other records have numbers of blocks in the output."""

    optional = frozenset({"depth"})

    depth: DepthRecord | None = None
