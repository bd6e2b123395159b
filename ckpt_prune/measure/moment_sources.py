"""Sources of moments: none, statistics on disk, or a live stream of hidden states.

The engine and the closed forms do not know which (measure/README.md, section 2).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from ckpt_prune.measure.moments.kinds import Key, SpaceMoments, select_input_moments
from ckpt_prune.measure.statistics.end_states import EndStates
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.block_memory import are_same
from ckpt_prune.measure.streams.drift import ends_block, observe_drift
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.model import Model


class MomentSource(Protocol):
    """Hands out the moments of a block's spaces or linear modules, and goes on when the block is done."""

    def group_keys(self, keys: list[Key]) -> list[list[Key]]:
        """Group what is pruned together, in order: moments are asked for once per group."""
        ...

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Return moments of spaces or linear modules, a tuple over folds; `tensors` is the block as it stands now."""
        ...

    def measure_shortfall(
        self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor], keys: list[Key]
    ) -> dict[Key, SpaceMoments]:
        """Return moments of spaces that end in a consumer, with what the block's output lacks as their drift.

        `dense` holds the block's tensors before anything was pruned, `tensors` those it has now.

        Raises:
            ValueError: no block is run.
        """
        ...

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Go on behind the block, which is done and has these tensors."""
        ...


class NoMoments:
    """A source for recipes that need no moments."""

    def group_keys(self, keys: list[Key]) -> list[list[Key]]:
        return [keys]

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Return nothing."""
        return {}

    def measure_shortfall(
        self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor], keys: list[Key]
    ) -> dict[Key, SpaceMoments]:
        """Refuse: statistics on disk are of the dense model alone."""
        raise ValueError("what a pruned block lacks is known where it runs alone")

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""


class KnownMoments(NoMoments):
    """Moments of one block that were read or measured before, by space or linear module."""

    def __init__(self, known: Mapping[Any, SpaceMoments]) -> None:
        self._known = known

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        return {key: self._known[key] for key in keys}


class CachedMoments(NoMoments):
    """Moments of the dense model from statistics on disk."""

    def __init__(self, statistics: Statistics, model: Model) -> None:
        self._statistics, self._model = statistics, model

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Read the block's moments, and the Taylor importances of its sites, from disk."""
        names = {key: self._model.moments_name(block, key) for key in keys}
        moments = self._statistics.read_moments(block, set(names.values()))
        for name, taylor in self._statistics.read_taylor(block).items():
            if name in moments:
                moments[name] = tuple(replace(fold, taylor=taylor) for fold in select_input_moments(moments[name]))
        return {key: moments[name] for key, name in names.items() if name in moments}


class SequentialMoments:
    """Moments measured behind the already pruned blocks.

    Args:
        stream: hidden states, at the input of the first block.
        gram: for each space or linear module that will be asked for, whether the Gram is needed.
        true_sequential: measure again inside a block after each of them is pruned. Experts stand beside each other:
            they are measured together.
    """

    def __init__(self, stream: HiddenStream, gram: Mapping[Any, bool], *, true_sequential: bool) -> None:
        self.stream, self._gram, self._true_sequential = stream, gram, true_sequential

    def group_keys(self, keys: list[Key]) -> list[list[Key]]:
        """Return a group for each key, experts together, if true-sequential; else one, and what stands behind it."""
        groups: dict[str, list[Key]] = {}
        for key in keys:
            apart = self._true_sequential or key in self.stream.factory.family.pooling
            groups.setdefault(self.stream.factory.name_without_expert(key) if apart else "", []).append(key)
        return list(groups.values()) or [[]]

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Measure the moments of the block behind the pruned blocks."""
        return self.stream.observe(block, tensors, {key: self._gram[key] for key in keys})

    def measure_shortfall(
        self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor], keys: list[Key]
    ) -> dict[Key, SpaceMoments]:
        """Measure what the dense block adds to the pruned stream, and this one does not."""
        return observe_drift(self.stream, self.stream, block, dense, tensors, dict.fromkeys(keys, True))[0]

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the pruned block's output become the next block's input."""
        self.stream.advance(block, tensors)


class FollowedMoments(SequentialMoments):
    """Moments measured on the stream of an earlier step, which moves it on."""

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""


class DriftMoments(SequentialMoments):
    """Moments measured behind the pruned blocks, with their drift from the dense model (compensation, section 4).

    The moments of queries and keys are the sequential ones. Two blocks and two sets of hidden states are held. The
    dense block runs once if its norms come first: its output is what later groups need, and the next block's input.
    Otherwise it runs for every group.

    Args:
        stream, dense: hidden states of both models at the input of the first block, of the same samples and folds.
        read_block: reads the on-disk tensors of a block of the dense model.
        gram, true_sequential: as in `SequentialMoments`.
        seen: maps the dense stream to what a narrower pruned one has room for (`observe_drift`).
        ends: the dense states of all samples behind every block, if they are kept: then the dense block runs only where
            the stream inside it is needed, and no pruned block runs before the first one that loses something.
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
        ends: EndStates | None = None,
    ) -> None:
        super().__init__(stream, gram, true_sequential=true_sequential)
        self.dense, self._read_block, self._seen, self._ends = dense, read_block, seen, ends
        self._is_pre_norm: bool | None = None
        self._groups: list[list[Any]] = []
        self._passed = False
        # What kept states hold is the dense model's alone: as long as nothing is pruned, the stream's, too.
        self._are_alike = ends is not None and ends.dtype == stream.states.dtype and seen is None

    def group_keys(self, keys: list[Key]) -> list[list[Key]]:
        """Return a group for each key if true-sequential, else one group; remember what later groups need."""
        groups = super().group_keys(keys)
        self._groups = [list(group) for group in groups]
        return groups

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Measure the moments of the block behind the pruned blocks, with drift if a space has a consumer."""
        gram = {key: self._gram[key] for key in keys}
        later = None
        if keys in self._groups:
            later = [key for group in self._groups[self._groups.index(keys) + 1 :] for key in group]
        if later is not None and not self._passed and self._needs_end_alone(block, tensors, keys + later):
            self._go_to_end(block)
        dense = None if self._passed else self._read_block(block)
        moments, self._passed = observe_drift(
            self.dense, self.stream, block, dense, tensors, gram, later=later, narrow=self._seen
        )
        return moments

    def measure_shortfall(
        self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor], keys: list[Key]
    ) -> dict[Key, SpaceMoments]:
        """Measure what the dense model's stream has behind the block, and the pruned one lacks."""
        tensors_of_dense = None if self._passed else self._read_block(block)
        gram = dict.fromkeys(keys, True)
        return observe_drift(self.dense, self.stream, block, tensors_of_dense, tensors, gram, narrow=self._seen)[0]

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the outputs of the pruned and of the dense block become the inputs of the next ones."""
        if self._are_alike and self._ends is not None and not self._passed and self._is_whole(block, tensors):
            self._go_to_end(block)
            self.stream.enter(self.dense.states)
        else:
            self._are_alike = False
            super().advance(block, tensors)
            if not self._passed:
                self._go_to_end(block)
        self._passed = False

    def _is_whole(self, block: int, tensors: Mapping[str, Tensor]) -> bool:
        """Return True if a block is the dense model's, bit for bit."""
        dense = self._read_block(block)
        return dense.keys() == tensors.keys() and all(are_same(dense[name], tensors[name]) for name in dense)

    def _needs_end_alone(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> bool:
        """Return True if the dense stream behind a block is known, and is all of it that these spaces ask for."""
        family = self.stream.factory.family
        spaces = [key for key in keys if key in family.columns]
        if self._ends is None or any(map(family.mixes, spaces)):
            return False
        if self._is_pre_norm is None and spaces:
            self._is_pre_norm = ends_block(self.stream, block, tensors, spaces)
        return bool(self._is_pre_norm) or not spaces

    def _go_to_end(self, block: int) -> None:
        """Let the dense stream pass a block that it is at the input of."""
        if self._ends is None:
            self.dense.advance(block, self._read_block(block))
        else:
            self.dense.enter(self._ends.read(block))
        self._passed = True
