"""The work of the stage `recovery`: train blocks right after they are pruned, or scales of all at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Meter, meter
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.parallel.group import process_group
from ckpt_prune.stages.recovery.keys import Recovery
from ckpt_prune.stages.recovery.laco import Recoverer
from ckpt_prune.stages.recovery.records import RecoveredLayer
from ckpt_prune.stages.recovery.reports import recovery_of
from ckpt_prune.stages.recovery.scale_blocks import scale_blocks
from ckpt_prune.stages.recovery.snows import SnowsRecoverer
from ckpt_prune.stages.recovery.target import pruned_view, target_of
from ckpt_prune.stages.recovery.training import SampleSplit


class RecoverStep(Step):
    """Trains what stays of a block (LaCo)."""

    record = RecoveredLayer
    needs_input = True
    shows_progress = True

    def __init__(self, recoverer: Recoverer) -> None:
        self.recoverer, self._epochs = recoverer, Meter(None)

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, list[BaseModel]]:
        new, layer = self.recoverer.block(block, tensors, self._epochs)
        return new, [layer]

    def advance_input(self, block: int, tensors: Tensors) -> None:
        self.recoverer.follow(block, tensors)

    def advance(self, block: int, tensors: Tensors) -> None:
        self.recoverer.advance(block, tensors)
        self._epochs.to(self.recoverer.epochs_until(block))

    @contextmanager
    def progress(self) -> Iterator[None]:
        with meter(self.recoverer.epochs, "recovering", unit="epoch") as self._epochs:
            yield


def check_trainable(samples: int) -> None:
    """Refuse too few samples to train on and hold some out."""
    if samples < 2:
        raise UserError(f"recovery needs samples to train on and others to hold out: give at least 2, not {samples}")


def recover_step(recovery: Recovery, prepared: Prepared) -> RecoverStep | None:
    """Return what trains each block after it is pruned; None if all are recovered at the end."""
    if recovery.at_the_end:
        return None
    training, dense_view = prepared.job.training, target_of(prepared) or prepared.view
    assert training is not None
    group, split = process_group(), SampleSplit.of(len(training.samples), recovery.held_out)
    how: dict[str, Any] = {"allocate": training.allocate, "group": group}
    samples, dtype = training.samples, training.compute_dtype
    dense = dense_view.stream(samples, dtype, **how)
    pruned = pruned_view(prepared).stream(samples, dtype, sizes=split.sizes(recovery, group), **how)
    arguments = (dense, dense_view.block, pruned, split, recovery, recovery.seed, training.after, training.allocate)
    by_snows = recovery.method == "snows"
    return RecoverStep(SnowsRecoverer(*arguments, snows=recovery) if by_snows else Recoverer(*arguments))


def finish_recovery(recovery: Recovery, prepared: Prepared, run: Run) -> None:
    """Fit scales to the blocks that are written, and multiply them in; or note what LaCo has done."""
    if recovery.at_the_end:
        run.done["adapters"] = process_group().alone(lambda: scale_blocks(recovery, prepared, run))
        return
    step, dense = run.steps[Recovery.key], prepared.job.dense
    if isinstance(step, RecoverStep):
        checkpoint = (dense or prepared.model).checkpoint
        run.done["recovery"] = recovery_of(step.recoverer, checkpoint, on_the_fly=dense is None)
