"""A step: what a stage does to each block. The walk over blocks knows no more of stages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.checkpoint.packed import unpack_weights
from ckpt_prune.common.phases import phase
from ckpt_prune.measure.moment_sources import MomentSource, SequentialMoments
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.factors import multiply_factors

Tensors = Mapping[str, Tensor]
"""On-disk name → tensor of a block."""


class Step:
    """Acts on one block after the other.

    A resumed run calls `act` only for blocks that are not written yet, and `advance` for all of them. So hidden states
    move in `advance`, with the tensors that were written, and resuming gives the bytes of an uninterrupted run.

    Attributes:
        needs_input: True if it also follows the model as it is without this step. `advance_input` is then called before
            `advance`; for a block that an interrupted run has written, the steps before act again to make its input.
        apart: True if no block depends on what was done to another, so that several processes may share the blocks.
        shows_progress: True if it shows a bar of its own.
    """

    record: type[BaseModel]
    needs_input: ClassVar[bool] = False
    apart: bool = False
    shows_progress: bool = False

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, Sequence[BaseModel]]:
        """Return the new tensors of a block, and records of what was done. Change nothing that outlives the call.

        `tensors` are as the steps before have left them.
        """
        raise NotImplementedError

    def advance_input(self, block: int, tensors: Tensors) -> None:
        """Move on with the block as `act` was given it."""

    def advance(self, block: int, tensors: Tensors) -> None:
        """Move on to the next block; `tensors` are those that were written, behind the last step."""

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show a bar while blocks are worked on, if it has one."""
        yield


class BlockPruner(Protocol):
    """Prunes, masks or factors one block at a time."""

    @property
    def record(self) -> type[BaseModel]: ...

    def block(self, block: int, tensors: Tensors, source: MomentSource) -> tuple[Tensors, Sequence[BaseModel]]:
        """Return a block's new tensors, and records of what was done to it."""


class PruneStep(Step):
    """Prunes a block by moments of what reaches it; `source` stands at the first block."""

    def __init__(self, pruner: BlockPruner, source: MomentSource) -> None:
        self.pruner, self.source = pruner, source
        self.record = pruner.record
        self.apart = not isinstance(source, SequentialMoments)
        self._carried: HiddenStream | None = None

    def prefix(self, open_stream: Callable[[], HiddenStream]) -> HiddenStream:
        """Return hidden states behind the pruned blocks: those that moments are measured on, or others, carried along.

        `open_stream` opens those at the first block, before anything is pruned.
        """
        if isinstance(self.source, SequentialMoments):
            return self.source.stream
        if self._carried is None:
            self._carried, self.apart = open_stream(), False
        return self._carried

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, Sequence[BaseModel]]:
        return self.pruner.block(block, tensors, self.source)

    def advance(self, block: int, tensors: Tensors) -> None:
        tensors = unpack_weights(tensors)
        with phase("calibration"):
            self.source.advance(block, multiply_factors(tensors))
        if self._carried is not None:
            self._carried.advance(block, tensors)
