"""Records of blocks that have lost their attention and a part of their MLP."""

from collections.abc import Sequence

from pydantic import Field

from ckpt_prune.common.records import Block, Count, Figure, FixedRecord


class BareBlock(FixedRecord):
    """A block that was replaced.

    Attributes:
        columns: of the MLP's, that stay; their numbers in the dense model, ascending. While nothing is measured, the
            first ones stand for them.
        error_before, error_after: mean squared error of the features before the head on images that are not trained
            on, when it was replaced and when all was trained behind that.
        epochs: that were trained.
    """

    block: Block
    columns: list[int]
    error_before: Figure = None
    error_after: Figure = None
    epochs: Figure = None


class BareRecord(FixedRecord):
    """Blocks without attention.

    Attributes:
        blocks: of the model.
        columns: of the MLP of a dense block.
        flops: to save, and saved.
        replaced: in the order in which they were.
        tried: mean KL divergence in nats with each block alone replaced and trained; empty if the blocks were given.
    """

    blocks: Count
    columns: Count
    flops: tuple[int, int]
    replaced: list[BareBlock]
    tried: list[Figure] = Field(default_factory=list)

    @property
    def trained(self) -> int:
        """How many blocks were trained."""
        return count_trained(self.blocks, [each.block for each in self.replaced])


def count_trained(blocks: int, replaced: Sequence[int]) -> int:
    """Return how many of a model's blocks are trained: those up to one behind the last that was replaced (DC-ViT)."""
    return min(blocks, max(replaced) + 2)


class BareFields(FixedRecord):
    """Blocks without attention; None if all have it."""

    optional = frozenset({"bare"})

    bare: BareRecord | None = None
