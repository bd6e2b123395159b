"""The work of the stage `rotation`: learn the rotations, of all blocks first or of each in its turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Meter, meter
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.measure.moment_sources import CachedMoments, MomentSource, NoMoments, SequentialMoments
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.sparsity.masks import keep_groups, keep_share
from ckpt_prune.stages.mask.keys import Mask
from ckpt_prune.stages.rotation.keys import Rotation
from ckpt_prune.stages.rotation.learner import Learner, WrittenRotations, journal_entry
from ckpt_prune.stages.rotation.records import Learned, RotationRecord
from ckpt_prune.stages.rotation.rotated_checkpoint import (
    BlockRotations,
    RotatedCheckpoint,
    Rotations,
    check_rotatable,
    not_learned,
)


def check_rotation(rotation: Rotation, prepared: Prepared) -> None:
    """Refuse to rotate a model whose residual stream or container does not allow it."""
    check_rotatable(prepared.model, rotation.kind)
    RotatedCheckpoint(prepared.model, rotation.kind, not_learned, prepared.device).check_final_norm()
    container = prepared.recipe.container
    if rotation.kind == "per-layer" and container not in ("auto", "any", "remote"):
        raise UserError(
            f"rotation per-layer turns the residual stream between blocks, which container {container} cannot: leave "
            "container out for remote code, or choose rotation kind shared"
        )


def rotate_unlearned(rotation: Rotation, prepared: Prepared) -> Prepared:
    """Return the state with the model under rotations that are not learned yet: names and shapes are known."""
    return replace(prepared, basis=RotatedCheckpoint(prepared.model, rotation.kind, not_learned, prepared.device))


def learn_rotations(rotation: Rotation, prepared: Prepared, run: Run) -> Prepared:
    """Return the state with the model under its rotations: learned now, or each as it is asked for."""
    assert run.writer is not None  # one process works alone
    rotations: Rotations
    if rotation.in_turn and prepared.sequential:
        rotations = InTurn(prepared, run.writer)
    else:
        with run.timer.time("rotations"):
            learner = learner_of(prepared)
            run.done["learned"] = learner.run(run.writer)
        rotations = WrittenRotations(run.writer.read, learner.sizes)
    return replace(prepared, basis=RotatedCheckpoint(prepared.model, rotation.kind, rotations, prepared.device))


def turn_step(prepared: Prepared) -> "TurnStep | None":
    """Return what shows the learning of rotations in turn; None if they are learned already."""
    rotations = rotations_in_turn(prepared)
    return None if rotations is None else TurnStep(rotations)


def note_learned(prepared: Prepared, run: Run) -> None:
    rotations = rotations_in_turn(prepared)
    if rotations is not None:
        run.done["learned"] = rotations.learned


def rotations_in_turn(prepared: Prepared) -> "InTurn | None":
    """Return the rotations that are learned in turn; None if there are none, or they are learned already."""
    rotations = prepared.basis.rotations if isinstance(prepared.basis, RotatedCheckpoint) else None
    return rotations if isinstance(rotations, InTurn) else None


def learner_of(prepared: Prepared) -> Learner:
    """Return what learns the recipe's rotations, at the first block."""
    recipe = prepared.recipe
    rotation, mask = prepared.stage(Rotation), prepared.stage(Mask)
    needs_moments = rotation.needs_moments(recipe)

    def source(learner: Learner) -> MomentSource:
        if not needs_moments:
            return NoMoments()
        if prepared.statistics is not None:
            return CachedMoments(prepared.statistics, prepared.model)
        if learner.sizes.kind == "shared":
            raise ValueError("one rotation of all blocks needs statistics: stages.spaces.measure_dense makes them")
        return SequentialMoments(prepared.live_stream(prepared.plain_view), learner.grams, true_sequential=False)

    pattern = mask.groups if rotation.entropy == "groups" else None
    groups = None if pattern is None else pattern.of
    if prepared.live is not None:
        samples = len(prepared.live.samples)
    else:
        samples = 0 if prepared.statistics is None else prepared.statistics.index.samples

    def choose(importance: torch.Tensor) -> torch.Tensor:
        if mask.groups is not None:
            return keep_groups(importance, mask.groups)
        return keep_share(importance, recipe.ratio, mask.compared)

    backbone = rotation.importance_for(recipe)
    return Learner(prepared.model, rotation, backbone, groups, samples, choose, source, prepared.device)


class InTurn:
    """Rotations that are learned as they are asked for, each on the blocks that are masked before its own.

    A block is measured unturned, as its function is that of the dense block, behind the masked blocks before it
    (DenoiseRotator's released code). So nothing is held but that block and the hidden states that the mask is measured
    on. Rotations stand in the journal before the block is masked: a resumed run sees the same ones.

    Attributes:
        stream: hidden states of the masked model at the input of the next block; None until the first block's rotations
            are known, which are those of the dense model.
    """

    def __init__(self, prepared: Prepared, writer: CheckpointWriter) -> None:
        self._prepared, self._writer = prepared, writer
        self._learner = learner_of(prepared)
        self._written = WrittenRotations(writer.read, self._learner.sizes)
        self._advance = Meter(None)
        self.stream: HiddenStream | None = None

    def __call__(self, block: int) -> BlockRotations:
        if journal_entry(block) not in self._writer.done:
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
        """Learned rotations of all blocks, as `Learner.run` returns them."""
        return [self._writer.notes[journal_entry(block)] for block in range(self._learner.sizes.blocks)]

    def _learn(self, block: int) -> None:
        learner = self._learner
        dense = learner.read(block)
        if block == 0:
            # Nothing is masked before it, and what enters it may absorb its rotation.
            moments, still = learner.moments(learner.source(learner), 0, dense), dense
        else:
            assert self.stream is not None
            still = self._undo_turns(block)
            moments = dict(self.stream.observe(block, still, learner.grams))
        terms = learner.weights(block, dense, learner.inputs(block, still, moments))
        learner.learn(block, terms, self._writer, self._advance)

    def _undo_turns(self, block: int) -> dict[str, Tensor]:
        """Return a dense block as the output's class runs it, in the basis that the checkpoint has."""
        sizes = self._learner.sizes
        one = torch.eye(sizes.hidden, dtype=torch.float64) if self._learner.turns_stream else None
        heads = torch.eye(sizes.head_dim, dtype=torch.float64).repeat(sizes.kv_heads, 1, 1)

        def known(index: int) -> BlockRotations:
            return (one, heads) if index == block else self._written(index)

        rotated = RotatedCheckpoint(self._prepared.model, sizes.kind, known, self._prepared.device)
        return replace(self._prepared, basis=rotated).view.block(block)


class TurnStep(Step):
    """Shows the learning of rotations that are learned as blocks ask for them."""

    record = BaseModel
    shows_progress = True

    def __init__(self, rotations: InTurn) -> None:
        self._rotations = rotations

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, list[BaseModel]]:
        return tensors, []

    @contextmanager
    def progress(self) -> Iterator[None]:
        with self._rotations.shown():
            yield


def report_rotation(rotation: Rotation, prepared: Prepared, run: Run) -> dict[str, Any]:
    basis = prepared.basis
    assert isinstance(basis, RotatedCheckpoint)
    record = RotationRecord(
        kind=rotation.kind,
        importance=rotation.importance_for(prepared.recipe),
        turns=bool(basis.turns),
        learned=[Learned.model_validate(entry) for entry in run.done["learned"]],
    )
    return {"rotation": record}
