"""Where units are kept or dropped: one space of one block."""

from typing import NamedTuple

from ckpt_prune.architectures.spaces import SpaceName


class Site(NamedTuple):
    """One space of one block, or of one expert where the block has several.

    Attributes:
        block: index of the block.
        space: which of its spaces.
        expert: index of the expert; None where the block has none.
    """

    block: int
    space: SpaceName
    expert: int | None = None
