"""What a model takes in time, as a table of a machine foresees it: so much a block, less for every unit that goes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from ckpt_prune.model.spaces import SpaceName, recipe_space

Units = Callable[[SpaceName], int]
"""A space → its units in a dense block."""


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StreamTime:
    """What one dimension of the residual stream takes. Nanoseconds.

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

    def narrowed(self, kept: int) -> "Latencies":
        """The table of a model whose stream has so many dimensions.

        What stands outside the blocks and a block are linear in them. A unit takes the same share of its block, because
        its rows and columns are as long as the stream is wide.

        Args:
            kept: dimensions; all of them where the table has no time of one.
        """
        if self.stream is None:
            return self
        gone = self.stream.width - kept
        block = self.block - gone * self.stream.block
        units = {space: own * block / self.block for space, own in self.units.items()}
        return replace(self, rest=self.rest - gone * self.stream.rest, block=block, units=units, stream=None)

    def of(self, blocks: int) -> int:
        """A model of so many dense blocks."""
        return round(self.rest + self.block * blocks)

    def at(self, units: Units, widths: Sequence[Mapping[SpaceName, int]]) -> int:
        """A model of blocks of these widths.

        Args:
            units: of a dense block.
            widths: units kept per block and space; a space that is not there is whole.
        """
        # Experts of a block share one figure: of each, its share of it.
        gone = 0.0
        for own in widths:
            alike: dict[str, list[int]] = {}
            for space, kept in own.items():
                alike.setdefault(recipe_space(space), []).append(units(space) - kept)
            gone += sum(self.units[space] * sum(lost) / len(lost) for space, lost in alike.items() if any(lost))
        return round(self.rest + self.block * len(widths) - gone)
