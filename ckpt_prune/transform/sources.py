"""Where the engine gets moments from: nowhere, statistics on disk, or a live stream of hidden states.

The engine and the closed forms do not know which (DESIGN, "moment source").
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ckpt_prune.architectures.family import Family, SpaceName
from ckpt_prune.calibration.kinds import SpaceMoments
from ckpt_prune.calibration.measure import moments_name
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.calibration.streams import HiddenStream

FoldedMoments = dict[SpaceName, SpaceMoments]


class MomentSource(Protocol):
    """Hands out the moments of a block's sites, and is told what became of the block."""

    def stages(self, spaces: list[SpaceName]) -> list[list[SpaceName]]:
        """Spaces to be pruned together, in order: moments are asked for once per stage."""
        ...

    def moments(self, block: int, tensors: Mapping[str, Tensor], spaces: list[SpaceName]) -> FoldedMoments:
        """Moments of these spaces, a tuple over folds; `tensors` is the block as it stands now."""
        ...

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """The block is done and has these tensors."""
        ...


class NoMoments:
    """For recipes that need none."""

    def stages(self, spaces: list[SpaceName]) -> list[list[SpaceName]]:
        """All spaces at once."""
        return [spaces]

    def moments(self, block: int, tensors: Mapping[str, Tensor], spaces: list[SpaceName]) -> FoldedMoments:
        """Nothing."""
        return {}

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to do."""


class CachedMoments(NoMoments):
    """The dense cache: statistics on disk."""

    def __init__(self, statistics: Statistics, family: Family) -> None:
        self._statistics, self._family = statistics, family

    def moments(self, block: int, tensors: Mapping[str, Tensor], spaces: list[SpaceName]) -> FoldedMoments:
        """The block's moments, read from disk."""
        names = {space: moments_name(self._family, block, space) for space in spaces}
        found = self._statistics.block(block, set(names.values()))
        return {space: found[name] for space, name in names.items() if name in found}


class SequentialMoments:
    """Measured on the already pruned prefix.

    Args:
        stream: hidden states, at the input of the first block.
        gram: for each space, whether its compensation needs the Gram.
        true_sequential: measure again after each space of a block, so that every site sees its own pruned prefix.
    """

    def __init__(self, stream: HiddenStream, gram: Mapping[SpaceName, bool], *, true_sequential: bool) -> None:
        self.stream, self._gram, self._true = stream, gram, true_sequential

    def stages(self, spaces: list[SpaceName]) -> list[list[SpaceName]]:
        """One space at a time where true-sequential, else all at once."""
        return [[space] for space in spaces] if self._true else [spaces]

    def moments(self, block: int, tensors: Mapping[str, Tensor], spaces: list[SpaceName]) -> FoldedMoments:
        """Moments of the block run on the pruned prefix's output."""
        return self.stream.observe(block, tensors, {space: self._gram[space] for space in spaces})

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the pruned block's output become the next block's input."""
        self.stream.advance(block, tensors)
