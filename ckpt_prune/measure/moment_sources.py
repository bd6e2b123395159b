"""Where the engine gets moments from: nowhere, statistics on disk, or a live stream of hidden states.

The engine and the closed forms do not know which (measure/README.md, section 2).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from ckpt_prune.architectures.model import Model
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.moments.kinds import Key, SpaceMoments
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.drift import observe_drift
from ckpt_prune.measure.streams.hidden_stream import HiddenStream


class MomentSource(Protocol):
    """Hands out the moments of a block's spaces or linear modules, and is told what became of the block."""

    def stages(self, keys: list[Key]) -> list[list[Key]]:
        """What is to be pruned together, in order: moments are asked for once per stage."""
        ...

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Moments of these spaces or linear modules, a tuple over folds; `tensors` is the block as it stands now."""
        ...

    def lacking(
        self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor], keys: list[Key]
    ) -> dict[Key, SpaceMoments]:
        """Moments of these spaces with what the block's output lacks, as their drift.

        Args:
            block: its index.
            dense: its tensors before anything went.
            tensors: as it stands now.
            keys: spaces that end in a consumer.

        Raises:
            ValueError: nothing is run.
        """
        ...

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """The block is done and has these tensors."""
        ...


class NoMoments:
    """For recipes that need none."""

    def stages(self, keys: list[Key]) -> list[list[Key]]:
        """All at once."""
        return [keys]

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Nothing."""
        return {}

    def lacking(
        self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor], keys: list[Key]
    ) -> dict[Key, SpaceMoments]:
        """Not known: what is on disk is of the dense model alone."""
        raise ValueError("what a pruned block lacks is known where it runs alone")

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to do."""


class KnownMoments(NoMoments):
    """Moments of one block that were read or measured before.

    Args:
        found: of its sites.
    """

    def __init__(self, found: Mapping[Any, SpaceMoments]) -> None:
        self._found = found

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Those that are asked for."""
        return {key: self._found[key] for key in keys}


class CachedMoments(NoMoments):
    """The dense cache: statistics on disk."""

    def __init__(self, statistics: Statistics, model: Model) -> None:
        self._statistics, self._model = statistics, model

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """The block's moments, and what else there is of its sites, read from disk."""
        names = {key: self._model.moments_name(block, key) for key in keys}
        found = self._statistics.read_moments(block, set(names.values()))
        for name, own in self._statistics.read_taylor(block).items():
            if name in found:
                folds = (each for each in found[name] if isinstance(each, Moments))
                found[name] = tuple(replace(each, taylor=own) for each in folds)
        return {key: found[name] for key, name in names.items() if name in found}


class SequentialMoments:
    """Measured on the already pruned prefix.

    Args:
        stream: hidden states, at the input of the first block.
        gram: for each space or linear module that will be asked for, whether the Gram is needed.
        true_sequential: measure again after each of them, so that every one sees its own pruned prefix. Experts stand
            beside each other: none sees what became of the next.
    """

    def __init__(self, stream: HiddenStream, gram: Mapping[Any, bool], *, true_sequential: bool) -> None:
        self.stream, self._gram, self._true = stream, gram, true_sequential

    def stages(self, keys: list[Key]) -> list[list[Key]]:
        """One at a time where true-sequential, else all at once."""
        if not self._true:
            return [keys]
        stages: dict[str, list[Key]] = {}
        for key in keys:
            stages.setdefault(self.stream.factory.of_any_expert(key), []).append(key)
        return list(stages.values())

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Moments of the block run on the pruned prefix's output."""
        return self.stream.observe(block, tensors, {key: self._gram[key] for key in keys})

    def lacking(
        self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor], keys: list[Key]
    ) -> dict[Key, SpaceMoments]:
        """What the dense block makes of the pruned prefix's output, and this one does not."""
        return observe_drift(self.stream, self.stream, block, dense, tensors, dict.fromkeys(keys, True))[0]

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the pruned block's output become the next block's input."""
        self.stream.advance(block, tensors)


class DriftMoments(SequentialMoments):
    """Measured on the already pruned prefix, with its drift from the dense model (compensation/README.md, section 4).

    The moments of queries and keys are the sequential ones. Two blocks and two sets of hidden states are held. The
    dense block runs once where its norms come first: what it gives is what later stages need, and the next block's
    input. Otherwise it runs for every stage.

    Args:
        stream: hidden states of the model that is pruned, at the input of the first block.
        dense: those of the dense model there, of the same samples and folds.
        read_block: reads the on-disk tensors of a block of the dense model.
        gram: for each space that will be asked for, whether the Gram is needed.
        true_sequential: measure again after each of them, so that every one sees its own pruned prefix.
        seen: what of the dense stream the pruned one has room for, where that is narrower (`drift.observe_drift`).
    """

    def __init__(
        self,
        stream: HiddenStream,
        dense: HiddenStream,
        read_block: Callable[[int], Mapping[str, Tensor]],
        gram: Mapping[Any, bool],
        *,
        true_sequential: bool,
        seen: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(stream, gram, true_sequential=true_sequential)
        self.dense, self._read_block, self._seen = dense, read_block, seen
        self._stages: list[list[Any]] = []
        self._passed = False

    def stages(self, keys: list[Key]) -> list[list[Key]]:
        """One at a time where true-sequential, else all at once."""
        stages = super().stages(keys)
        self._stages = [list(stage) for stage in stages]
        return stages

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Moments of the block run on the pruned prefix's output, with drift where the space has a consumer."""
        gram = {key: self._gram[key] for key in keys}
        own = None if self._passed else self._read_block(block)
        later = None
        if keys in self._stages:
            later = [key for stage in self._stages[self._stages.index(keys) + 1 :] for key in stage]
        found, self._passed = observe_drift(
            self.dense, self.stream, block, own, tensors, gram, later=later, seen=self._seen
        )
        return found

    def lacking(
        self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor], keys: list[Key]
    ) -> dict[Key, SpaceMoments]:
        """What the dense model's stream has behind the block, and the pruned one's has not."""
        own = None if self._passed else self._read_block(block)
        gram = dict.fromkeys(keys, True)
        return observe_drift(self.dense, self.stream, block, own, tensors, gram, seen=self._seen)[0]

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the outputs of the pruned and of the dense block become the inputs of the next ones."""
        super().advance(block, tensors)
        if not self._passed:
            self.dense.advance(block, self._read_block(block))
        self._passed = False
