"""Predicted times of a model on one machine: so much for a block, less for every unit that goes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from ckpt_prune.model.spaces import SpaceName, recipe_space


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StreamTime:
    """Nanoseconds that one dimension of the residual stream takes.

    Attributes:
        width: dimensions of the dense stream.
        rest: of what stands outside the blocks.
        block: of a dense block.
    """

    width: int
    rest: float
    block: float


TRUSTED = 0.2
"""Share by which a table may miss the model that says how far off it is, and still be kept and relied on."""


@dataclass(frozen=True)
class Latencies:
    """Additive over blocks, and linear in the widths of each. Nanoseconds.

    Attributes:
        rest: of what stands outside the blocks: embeddings, final norm, head, and what calling a model takes.
        block: of a dense block.
        units: space → of one unit of it, by its name without an expert's number.
        stream: of a dimension of the residual stream; None where none is to go.
        off: share by which the table missed a model that was timed to hold it to account.
    """

    rest: float
    block: float
    units: Mapping[str, float]
    stream: StreamTime | None = None
    off: float = 0.0

    def narrow(self, kept: int) -> "Latencies":
        """Return the table of a model whose stream has so many dimensions.

        A block and what stands outside the blocks are linear in them. A unit takes the same share of its block, because
        its rows and columns are as long as the stream is wide.
        """
        if self.stream is None:
            return self
        gone = self.stream.width - kept
        block = self.block - gone * self.stream.block
        units = {space: seconds * block / self.block for space, seconds in self.units.items()}
        return replace(self, rest=self.rest - gone * self.stream.rest, block=block, units=units, stream=None)

    def of(self, blocks: int) -> int:
        """Return the time of a model of so many dense blocks."""
        return round(self.rest + self.block * blocks)

    def at(self, dense: Sequence[Mapping[SpaceName, int]], widths: Sequence[Mapping[SpaceName, int]]) -> int:
        """Return the time of a model of blocks of these widths.

        Args:
            dense: units per block and space of the dense model, at least for as many blocks.
            widths: units kept; a space that is absent is whole.
        """
        # The time of a unit is that of all experts of a block together: each expert accounts for its share.
        saved = 0.0
        for units, block_widths in zip(dense, widths, strict=False):
            alike: dict[str, list[int]] = {}
            for space, kept in block_widths.items():
                alike.setdefault(recipe_space(space), []).append(units[space] - kept)
            saved += sum(self.units[space] * sum(lost) / len(lost) for space, lost in alike.items() if any(lost))
        return round(self.rest + self.block * len(widths) - saved)
