"""Hidden states of a dense model beside one that lacks some of its blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from ckpt_prune.architectures.model import Model
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream


@dataclass(frozen=True)
class KeptBlocks:
    """What a stream of a dense model goes through in one step.

    Attributes:
        whole: the dense model.
        kept: its blocks that the other model has.
    """

    whole: Model
    kept: Sequence[int]

    def behind(self, index: int) -> range:
        """Blocks of the dense model up to where the other has left its block `index`: the gap behind it included."""
        ends = [0, *self.kept[1:], self.whole.blocks]
        return [range(start, stop) for start, stop in pairwise(ends)][index]


class KeptBlockStream(HiddenStream):
    """A dense model's hidden states that go on past every gap with the block before it.

    Args:
        factory: of the whole model's blocks.
        leaps: which of them.
        options: as `HiddenStream` takes them.
    """

    def __init__(self, factory: BlockFactory, leaps: KeptBlocks, *options: Any, **more: Any) -> None:
        super().__init__(factory, *options, **more)
        self._leaps = leaps

    def advance(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the states go on as far as those of the other model do with its block `index`.

        Args:
            index: of the block, as the other model counts.
            tensors: not used: what the dense model has there is read.
        """
        for block in self._leaps.behind(index):
            super().advance(block, self._leaps.whole.read_block(block))
