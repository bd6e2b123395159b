"""Learning a recipe's rotations: of all blocks before the first is masked, or of each on what is masked before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.calibration.sources import CachedMoments, MomentSource, NoMoments, SequentialMoments
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.progress import Meter, meter
from ckpt_prune.rotations.learning import Learner, WrittenRotations, unit_of
from ckpt_prune.rotations.rotated import BlockRotations
from ckpt_prune.transform.settle import Settled


def learner_of(settled: Settled) -> Learner:
    """What learns the recipe's rotations, at the first block."""
    recipe, request = settled.recipe, settled.request
    assert recipe.rotation is not None
    assert recipe.mask is not None

    def source(learner: Learner) -> MomentSource:
        if not recipe.rotation_needs_moments:
            return NoMoments()
        if request.statistics is not None:
            return CachedMoments(request.statistics, settled.model)
        if learner.sizes.kind == "shared":
            raise ValueError("one rotation of all blocks needs statistics: transform.measuring makes them")
        return SequentialMoments(settled.live_stream(settled.source), learner.grams, true_sequential=False)

    pattern = recipe.mask.groups if recipe.rotation.entropy == "groups" else None
    groups = None if pattern is None else pattern.of
    return Learner(settled.model, recipe.rotation, recipe.importance, groups, source, request.device)


class InTurn:
    """Rotations that are learned as they are asked for, each on the blocks that are masked before its own.

    A block is measured unturned, as its function is that of the dense block, behind the masked blocks before it
    (DenoiseRotator's released code). So nothing is held but that block and the hidden states that the mask is measured
    on. Rotations stand in the journal before the block is masked: a resumed run sees the same ones.

    Args:
        settled: the job, without rotations.
        writer: as `Learner.run` takes it.

    Attributes:
        stream: hidden states of the masked model at the input of the next block; None until the first block's rotations
            are known, which are those of the dense model.
    """

    def __init__(self, settled: Settled, writer: CheckpointWriter) -> None:
        self._settled, self._writer = settled, writer
        self._learner = learner_of(settled)
        self._written = WrittenRotations(writer.read, self._learner.sizes)
        self._advance = Meter(None)
        self.stream: HiddenStream | None = None

    def __call__(self, block: int) -> BlockRotations:
        """R1 and R2 of a block, float64."""
        if unit_of(block) not in self._writer.done:
            self._learn(block)
            self._advance.to((block + 1) * self._learner.recipe.steps)
        return self._written(block)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the steps of every block while they are learned."""
        steps = self._learner.sizes.blocks * self._learner.recipe.steps
        with meter(steps, "learning rotations, and masking") as self._advance:
            yield

    @property
    def learned(self) -> list[dict[str, Any]]:
        """What was learned, as `Learner.run` gives it."""
        return [self._writer.notes[unit_of(block)] for block in range(self._learner.sizes.blocks)]

    def _learn(self, block: int) -> None:
        learner = self._learner
        dense = learner.read(block)
        if block == 0:
            # Nothing is masked before it, and what enters it may absorb its rotation.
            found, still = learner.moments(learner.source(learner), 0, dense), dense
        else:
            assert self.stream is not None
            still = self._unturned(block)
            found = dict(self.stream.observe(block, still, learner.grams))
        terms = learner.weights(block, dense, learner.inputs(block, still, found))
        learner.learn(block, terms, self._writer, self._advance)

    def _unturned(self, block: int) -> dict[str, Tensor]:
        """A dense block as the output's class runs it, in the basis that the checkpoint has."""
        rotated = self._settled.rotated
        assert rotated is not None
        sizes = self._learner.sizes
        one = torch.eye(sizes.hidden, dtype=torch.float64) if self._learner.turns_stream else None
        heads = torch.eye(sizes.head_dim, dtype=torch.float64).repeat(sizes.kv_heads, 1, 1)

        def known(index: int) -> BlockRotations:
            return (one, heads) if index == block else self._written(index)

        return replace(self._settled, rotations=known).dense.block(block)
