"""Hidden states of a dense model beside those of a model that lacks some of its blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.model import Model


@dataclass(frozen=True)
class KeptBlocks:
    """A dense model, and which of its blocks the shortened model has."""

    whole: Model
    kept: Sequence[int]

    def dense_range(self, index: int) -> range:
        """Return the dense blocks that block `index` of the shortened model stands for, the gap behind it included."""
        ends = [0, *self.kept[1:], self.whole.blocks]
        return range(ends[index], ends[index + 1])


class KeptBlockStream(HiddenStream):
    """A dense model's hidden states that go from one kept block to the next.

    Args:
        factory: of the dense model's blocks.
        blocks: the dense model, and which blocks are kept.
        options: as `HiddenStream` takes them.
    """

    def __init__(self, factory: BlockFactory, blocks: KeptBlocks, *options: Any, **more: Any) -> None:
        super().__init__(factory, *options, **more)
        self._blocks = blocks

    def advance(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Go as far as the shortened model goes with its block `index`; the dense model's tensors are read."""
        for block in self._blocks.dense_range(index):
            super().advance(block, self._blocks.whole.read_block(block))
