"""Recover a pruned model beside its dense one, one block of each at a time (LaCo, Algorithm 1)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import Meter
from ckpt_prune.evaluation.similarity import StateSimilarity
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages.recovery.block_training import Tensors, rows_within, train_block, trainable_tensors
from ckpt_prune.stages.recovery.records import RecoveredLayer
from ckpt_prune.stages.recovery.training import SampleSplit, Trained, cut, part_size

_UNLIKE = 0.3
"""Relative difference of the hidden states entering the first block, above which two models have nothing in common."""
_COMPARED_TOKENS = 32768
"""Held-out tokens that mean squared errors and CKA are of, or all (a Gram of the hidden size takes time)."""


@dataclass(frozen=True)
class Recoverer:
    """Recovers one block after the other. Both streams are at the first block when it is made.

    The dense stream goes one block ahead of the pruned one: what leaves the dense block is what is trained for.

    Args:
        dense: hidden states of the dense model, in the basis of the pruned one's.
        read_dense: reads the dense model's tensors of a block, by on-disk name.
        pruned: hidden states of the pruned model, on the same samples, with `SampleSplit.sizes` among its own.
        after: numbers of blocks k: the perplexity of the model with its first k blocks recovered is measured.
        allocate: makes the tensors for the hidden states of models with fewer blocks recovered.
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
        factory = self.pruned.factory
        return factory.model.blocks

    @cached_property
    def recovered_blocks(self) -> range:
        return self.settings.blocks(self.blocks)

    @cached_property
    def rate(self) -> float:
        factory = self.pruned.factory
        return self.settings.rate(factory.model.dimension("hidden"))

    @property
    def summary(self) -> str:
        """One line about the work that is coming."""
        samples, held_out = self.pruned.samples, len(self.split.measured) if self.settings.held_out else 0
        image = self.pruned.factory.family.modality == "image"
        what = "images" if image else f"windows of {samples.tokens} tokens"
        return (
            f"recovering {len(self.recovered_blocks)} of {self.blocks} blocks on {self.split.samples} {what}, "
            f"{held_out} of them held out, up to {plural(self.settings.epochs, 'epoch')} at lr {self.rate:.3g}"
        )

    @property
    def epochs(self) -> int:
        """Epochs of all blocks, at most."""
        return len(self.recovered_blocks) * self.settings.epochs

    def epochs_until(self, index: int) -> int:
        """Count the epochs of the blocks up to `index`, that one included."""
        return sum(block <= index for block in self.recovered_blocks) * self.settings.epochs

    def block(self, index: int, pruned: Mapping[str, Tensor], meter: Meter) -> tuple[Tensors, RecoveredLayer]:
        """Recover one block; no stream moves. Return its tensors as they are to be written, and the record.

        Args:
            index: of the block, each in turn.
            pruned: its tensors as they were pruned, by on-disk name.
            meter: over the epochs of all wanted blocks.
        """
        as_pruned = self.pruned.factory.build_block(index, pruned)
        start, cka_start = self._likeness(as_pruned, index)
        before, cka_before = self._likeness(as_pruned, index, self._branches[0])
        # Training has a block of its own.
        del as_pruned
        trained = Trained[Tensors]()
        if index in self.recovered_blocks:
            trained = self._train(index, pruned, self._targets(index), meter)
            meter.to(self.epochs_until(index))
        new, after, cka_after = dict(pruned), start, cka_start
        if trained.kept is not None:
            new = trained.kept
            after, cka_after = self._likeness(self.pruned.factory.build_block(index, new), index)
        return new, RecoveredLayer(
            block=index,
            mse_before=before,
            mse_start=start,
            mse_after=after,
            cka_before=cka_before,
            cka_after=cka_after,
            epochs=round(trained.epochs),
            best_epoch=trained.best_epoch,
            rate=(trained.rate or None) if trained.best_epoch else None,
            diverged=trained.diverged,
            recovered=trained.best_epoch > 0,
            curve=list(trained.curve),
        )

    def follow(self, index: int, pruned: Mapping[str, Tensor]) -> None:
        """Move the models with fewer blocks recovered through a block as it was pruned; `advance` comes next."""
        as_pruned = self.pruned.factory.build_block(index, pruned)
        for blocks, states in self._branches.items():
            for start in range(0, len(states), self._part):
                part = slice(start, start + self._part)
                output = self._run(as_pruned, index, states[part], self._own_measured[part])
                self._branches[blocks] = self.pruned.put(self._branches[blocks], part, output)

    def advance(self, index: int, written: Mapping[str, Tensor]) -> None:
        """Move the pruned model through a block as it was written, and the dense one through the next."""
        self.pruned.advance(index, written)
        if index + 1 in self.after and index + 1 < self.blocks:
            self._branch(index + 1)
        if index + 1 < self.blocks:
            self.dense.advance(index + 1, self.read_dense(index + 1))

    def perplexities(self) -> list[dict[str, float | None]] | None:
        """Return perplexities on measured windows with the first k blocks recovered, after the last block.

        k is none, all, and the numbers asked for, ascending. A perplexity too large for a float is None. The result is
        None for a model that is no causal language model.
        """
        if not self.pruned.factory.family.causal:
            return None
        perplexities: list[dict[str, float | None]] = []
        for blocks in [*sorted(self._branches), self.blocks]:
            rows = self._own_measured
            nll = self.pruned.measure_nll(self._branches.get(blocks, (self.pruned.states[row] for row in rows)), rows)
            # JSON has no infinity.
            perplexities.append({"blocks": blocks, "perplexity": math.exp(nll) if nll < 700 else None})
        return perplexities

    def _targets(self, index: int) -> Tensor:
        """Run the dense block on the dense model's stream, or on the pruned one's, which is at its input."""
        if self.settings.teacher == "dense":
            return self.dense.states
        block = self.dense.factory.build_block(index, self.read_dense(index))
        return self.dense.pass_through(block, index, self.pruned.states, self._dense_output)

    @cached_property
    def _dense_output(self) -> Tensor:
        """Memory for the outputs of dense blocks on the pruned model's stream."""
        return self.allocate(tuple(self.pruned.states.shape), self.pruned.states.dtype)

    def _train(self, index: int, pruned: Mapping[str, Tensor], targets: Tensor, meter: Meter) -> Trained[Tensors]:
        family = self.pruned.factory.family
        done = self.epochs_until(index) - self.settings.epochs
        named = f"block {index}"
        meter.say(named)

        def progress(epoch: int, error: float) -> None:
            meter.to(done + epoch)
            meter.say(f"{named} epoch {epoch}/{self.settings.epochs} error {error:.3g}")

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
        """From here on, follow the states of measured samples in the model with no more than `blocks` recovered."""
        rows, states = self._own_measured, self.pruned.states
        self._branches[blocks] = self.allocate((len(rows), *states.shape[1:]), states.dtype)
        for number, row in enumerate(rows.tolist()):
            self._branches[blocks][number] = states[row]

    @property
    def _part(self) -> int:
        return part_size(self.settings)

    @cached_property
    def _share(self) -> slice:
        return self.pruned.group.share(self.split.samples)

    @cached_property
    def _own_measured(self) -> Tensor:
        """Measured samples of this process, numbered as it counts them."""
        return rows_within(self.split.measured, self._share)

    @torch.no_grad()
    def _run(self, block: nn.Module, index: int, states: Tensor, rows: Tensor) -> Tensor:
        return self.pruned.run(block, index, states, rows).cpu() if len(states) else states

    def _likeness(self, block: nn.Module, index: int, entering: Tensor | None = None) -> tuple[float, float]:
        """Compare measured samples' states behind a block with the dense ones: mean squared error and linear CKA.

        `entering` are their states before it, of this process; by default those of the recovered model.
        """
        device, group, similarity, tokens = self.pruned.factory.device, self.pruned.group, StateSimilarity(), 0
        # How many of them are other processes', before this one's.
        before = int((self.split.measured < self._share.start).sum())
        for start in range(0, len(self.split.measured), self._part):
            first, last = (min(max(at - before, 0), len(self._own_measured)) for at in (start, start + self._part))
            rows = self._own_measured[first:last]
            states = self.pruned.states[rows] if entering is None else entering[first:last]
            ours = self._run(block, index, states, rows)
            mine, theirs = (group.join(each, 0) for each in (ours, self.dense.states[rows]))
            if group.first:
                similarity.add(mine.to(device), theirs.to(device))
            tokens += len(self.split.measured[start : start + self._part]) * mine.shape[1]
            if tokens >= _COMPARED_TOKENS:
                break
        return group.once(lambda: (similarity.mse, similarity.cka))


def check_same_start(dense: Tensor, pruned: Tensor) -> None:
    """Refuse two models that make different hidden states of the same samples before their first block.

    The states are (N, T, hidden).
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
