"""Where units are kept or dropped: one space of one block."""

from typing import NamedTuple

from ckpt_prune.model.spaces import SpaceName


class Site(NamedTuple):
    """One space of one block.

    Attributes:
        block: index of the block.
        space: which of its spaces; of a block with experts, of which expert, too (`spaces.space_of`).
    """

    block: int
    space: SpaceName
