"""Walking a dense and a pruned model side by side, one block of each at a time (LaCo, Algorithm 1)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Meter
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.training_settings import RecoverySettings
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.stages.recovery.block_training import (
    SampleSplit,
    TrainedBlock,
    cut,
    part_size,
    rows_within,
    train_block,
)
from ckpt_prune.stages.recovery.similarity import StateSimilarity
from ckpt_prune.stages.recovery.trainable import trainable_tensors

_UNLIKE = 0.3
"""Relative difference of the hidden states entering the first block, above which two models have nothing in common."""
_COMPARED_TOKENS = 32768
"""Held-out tokens that mean squared errors and CKA are of, or all (a Gram of the hidden size takes time)."""


@dataclass(frozen=True)
class Recoverer:
    """Recovers one block after the other. Both streams are at the first block when it is made.

    The dense stream goes one block ahead of the pruned one: what leaves the dense block is what is trained for.

    Args:
        dense: the dense model's hidden states, in the basis of the pruned one's.
        read_dense: reads the dense model's tensors of a block, by on-disk name.
        pruned: the pruned model's, on the same samples, with `Split.sizes` among its own.
        split: of the samples.
        settings: of training.
        seed: of the order of samples.
        after: numbers of blocks k, for the perplexity of the model of which the first k blocks are recovered.
        allocate: makes the tensors that hold what models with fewer blocks recovered make of measured samples.

    Raises:
        UserError: the two models start from different hidden states.
    """

    dense: HiddenStream
    read_dense: Callable[[int], Mapping[str, Tensor]]
    pruned: HiddenStream
    split: SampleSplit
    settings: RecoverySettings
    seed: int
    after: frozenset[int] = frozenset()
    allocate: Allocate = allocate_in_memory
    _branches: dict[int, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_same_start(self.dense.states, self.pruned.states)
        # Nothing recovered: what the pruned model itself makes of measured samples.
        self._branch(0)
        self.dense.advance(0, self.read_dense(0))

    @cached_property
    def blocks(self) -> int:
        """Number of blocks."""
        factory = self.pruned.factory
        return factory.model.blocks

    @cached_property
    def wanted(self) -> range:
        """Blocks that are recovered."""
        return self.settings.blocks(self.blocks)

    @cached_property
    def rate(self) -> float:
        """The learning rate."""
        factory = self.pruned.factory
        return self.settings.rate(factory.model.dimension("hidden"))

    @property
    def summary(self) -> str:
        """What is about to be done, in a line."""
        samples, held_out = self.pruned.samples, len(self.split.measured) if self.settings.held_out else 0
        image = self.pruned.factory.family.modality == "image"
        what = "images" if image else f"windows of {samples.tokens} tokens"
        return (
            f"recovering {len(self.wanted)} of {self.blocks} blocks on {self.split.samples} {what}, "
            f"{held_out} of them held out, up to {self.settings.epochs} epochs at lr {self.rate:.3g}"
        )

    @property
    def epochs(self) -> int:
        """Epochs of all blocks, at most."""
        return len(self.wanted) * self.settings.epochs

    def epochs_until(self, index: int) -> int:
        """Epochs of the blocks up to `index`, that one included."""
        return sum(block <= index for block in self.wanted) * self.settings.epochs

    def block(self, index: int, pruned: Mapping[str, Tensor], meter: Meter) -> tuple[dict[str, Tensor], RecoveredLayer]:
        """Recover one block. No stream moves.

        Args:
            index: of the block, each in turn.
            pruned: its tensors as they were pruned, by on-disk name.
            meter: over the epochs of all wanted blocks.

        Returns:
            The block's tensors as they are to be written, and the record.
        """
        as_pruned = self.pruned.factory.build_block(index, pruned)
        start, cka_start = self._likeness(partial(self._through, as_pruned, index))
        before, cka_before = self._likeness(partial(self._without_recovery, as_pruned, index))
        # Training has a block of its own.
        del as_pruned
        trained = TrainedBlock(dict(pruned))
        if index in self.wanted:
            trained = self._train(index, pruned, self._targets(index), meter)
            meter.to(self.epochs_until(index))
        after, cka_after = start, cka_start
        if trained.best_epoch > 0:
            block = self.pruned.factory.build_block(index, trained.tensors)
            after, cka_after = self._likeness(partial(self._through, block, index))
        return trained.tensors, RecoveredLayer(
            block=index,
            mse_before=before,
            mse_start=start,
            mse_after=after,
            cka_before=cka_before,
            cka_after=cka_after,
            epochs=trained.epochs,
            best_epoch=trained.best_epoch,
            rate=trained.rate,
            diverged=trained.diverged,
            recovered=trained.best_epoch > 0,
            curve=list(trained.curve),
        )

    def follow(self, index: int, pruned: Mapping[str, Tensor]) -> None:
        """Let the models with fewer blocks recovered go through a block as it was pruned; `advance` comes next."""
        as_pruned = self.pruned.factory.build_block(index, pruned)
        for states in self._branches.values():
            for start in range(0, len(states), self._part):
                part = states[start : start + self._part]
                part.copy_(self._run(as_pruned, index, part))

    def advance(self, index: int, written: Mapping[str, Tensor]) -> None:
        """Let the pruned model go through a block as it was written, and the dense one through the next."""
        self.pruned.advance(index, written)
        if index + 1 in self.after and index + 1 < self.blocks:
            self._branch(index + 1)
        if index + 1 < self.blocks:
            self.dense.advance(index + 1, self.read_dense(index + 1))

    def perplexities(self) -> list[dict[str, float | None]] | None:
        """After the last block: perplexity on measured windows with the first k blocks recovered, ascending k.

        Numbers of blocks are none, all, and those asked for. A perplexity too large for a float is None, and so is
        everything for a model that is no causal language model.
        """
        if not self.pruned.factory.family.causal:
            return None
        found: list[dict[str, float | None]] = []
        for blocks in [*sorted(self._branches), self.blocks]:
            rows = self._own_measured
            nll = self.pruned.measure_nll(self._branches.get(blocks, (self.pruned.states[row] for row in rows)), rows)
            # JSON has no infinity.
            found.append({"blocks": blocks, "perplexity": math.exp(nll) if nll < 700 else None})
        return found

    def _targets(self, index: int) -> Tensor:
        """What the dense block makes of the dense model's stream, or of the pruned one's, which is at its input."""
        if self.settings.teacher == "dense":
            return self.dense.states
        block = self.dense.factory.build_block(index, self.read_dense(index))
        self.dense.pass_through(block, index, self.pruned.states, self._of_pruned)
        return self._of_pruned

    @cached_property
    def _of_pruned(self) -> Tensor:
        """Room for what dense blocks make of the pruned model's stream."""
        return self.allocate(tuple(self.pruned.states.shape), self.pruned.states.dtype)

    def _train(self, index: int, pruned: Mapping[str, Tensor], targets: Tensor, meter: Meter) -> TrainedBlock:
        family = self.pruned.factory.family
        done = self.epochs_until(index) - self.settings.epochs
        named = f"block {index}"
        meter.say(named)

        def progress(epoch: int, loss: float) -> None:
            meter.to(done + epoch)
            meter.say(f"{named} epoch {epoch}/{self.settings.epochs} loss {loss:.3g}")

        return train_block(
            self.pruned,
            index,
            pruned,
            trainable_tensors(family, index, pruned, self.settings.only, norms=self.settings.norms),
            targets,
            self.split,
            self.settings,
            rate=self.rate,
            seed=self.seed,
            progress=progress,
        )

    def _branch(self, blocks: int) -> None:
        """From here on, follow what the model makes of measured samples with no more than `blocks` recovered."""
        rows, states = self._own_measured, self.pruned.states
        self._branches[blocks] = self.allocate((len(rows), *states.shape[1:]), states.dtype)
        for number, row in enumerate(rows.tolist()):
            self._branches[blocks][number] = states[row]

    @property
    def _part(self) -> int:
        return part_size(self.settings)

    @cached_property
    def _share(self) -> slice:
        """The samples of this process."""
        return self.pruned.group.share(self.split.samples)

    @cached_property
    def _own_measured(self) -> Tensor:
        """Measured samples of this process, as it counts them."""
        return rows_within(self.split.measured, self._share)

    def _through(self, block: nn.Module, index: int, rows: slice) -> Tensor:
        """What a block makes of the states of some of this process's measured samples, on CPU."""
        return self._run(block, index, self.pruned.states[self._own_measured[rows]])

    def _without_recovery(self, block: nn.Module, index: int, rows: slice) -> Tensor:
        """What a block makes of the same samples' states in the model of which nothing is recovered, on CPU."""
        return self._run(block, index, self._branches[0][rows])

    @torch.no_grad()
    def _run(self, block: nn.Module, index: int, states: Tensor) -> Tensor:
        return self.pruned.run(block, index, states).cpu() if len(states) else states

    def _likeness(self, ours: Callable[[slice], Tensor]) -> tuple[float, float]:
        """Mean squared error and linear CKA of measured samples' states against the dense ones.

        Args:
            ours: states of a run of this process's measured samples.
        """
        device, group, similarity, tokens = self.pruned.factory.device, self.pruned.group, StateSimilarity(), 0
        # How many of them are other processes', before this one's.
        before = int((self.split.measured < self._share.start).sum())
        for start in range(0, len(self.split.measured), self._part):
            first, last = (min(max(at - before, 0), len(self._own_measured)) for at in (start, start + self._part))
            rows = slice(first, last)
            mine, theirs = (group.join(e, 0) for e in (ours(rows), self.dense.states[self._own_measured[rows]]))
            if group.first:
                similarity.add(mine.to(device), theirs.to(device))
            tokens += len(self.split.measured[start : start + self._part]) * mine.shape[1]
            if tokens >= _COMPARED_TOKENS:
                break
        return group.once(lambda: (similarity.mse, similarity.cka))


def check_same_start(dense: Tensor, pruned: Tensor) -> None:
    """Refuse two models that make different hidden states of the same samples before their first block.

    Args:
        dense: (N, T, hidden).
        pruned: the same of the other model.

    Raises:
        UserError: the shapes differ, or the difference is beyond what fine-tuned embeddings explain.
    """
    if dense.shape != pruned.shape:
        raise UserError(
            f"the two models make {dense.shape[1]} and {pruned.shape[1]} tokens of the same sample: the pruned one was "
            "not made from this dense one"
        )
    difference = energy = 0.0
    for ours, theirs in zip(cut(pruned, 8), cut(dense, 8), strict=True):
        difference += float((ours.float() - theirs.float()).square().sum(dtype=torch.float64))
        energy += float(theirs.float().square().sum(dtype=torch.float64))
    relative = math.sqrt(difference / energy) if energy else math.sqrt(difference)
    if not relative <= _UNLIKE:
        raise UserError(
            f"the two models make different hidden states of the same samples before their first block (relative "
            f"difference {relative:.2f}): the pruned one was not made from this dense one, or was rotated since"
        )
