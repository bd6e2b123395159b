"""Recovering a checkpoint that is pruned already, by this tool or another (LaCo after pruning)."""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ckpt_prune._version import __version__
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.report import Report
from ckpt_prune.job.report_file import report_of
from ckpt_prune.job.run import Announce, say_nothing
from ckpt_prune.job.training_settings import RecoverySettings
from ckpt_prune.job.walk import walk
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.kept_blocks import KeptBlocks
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.containers.container import Container, container_of
from ckpt_prune.model.model import Model
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.open_run import open_run
from ckpt_prune.runner.pairs import at_same_depth, check_models, rotated_as
from ckpt_prune.runner.publish import publish_copy, wanted_names
from ckpt_prune.stages.recovery.block_training import SampleSplit
from ckpt_prune.stages.recovery.laco import Recoverer
from ckpt_prune.stages.recovery.reports import recovery_of, report_of_recovery
from ckpt_prune.stages.recovery.run import RecoverStep, check_trainable
from ckpt_prune.stages.recovery.stage import Recovery
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint

_JOURNAL = 2
"""Form of the notes that a run leaves for the one that resumes it."""
WHY = "a model is recovered against the dense one it was made from"


@dataclass(frozen=True)
class RecoveryJob:
    """One pruned model and the dense one it was made from.

    Attributes:
        pruned: what is recovered.
        dense: whose hidden states are the target.
        settings: of training.
        samples: what to train on.
        seed: of the order of samples.
        compute_dtype: in which blocks run; masters are float32 in any case.
        device: where.
        allocate: makes the tensors that hold hidden states.
        after: numbers of blocks k, for the perplexity of the model of which the first k blocks are recovered.
        seen: whether the model was pruned on these samples, or fitted to them before; None where that is not known.
    """

    pruned: Model
    dense: Model
    settings: RecoverySettings
    samples: Samples
    seed: int = 0
    compute_dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    allocate: Allocate = allocate_in_memory
    after: frozenset[int] = frozenset()
    seen: bool | None = None


@dataclass(frozen=True)
class PreparedRecovery:
    """A checked request to recover.

    Attributes:
        request: as it was given.
        container: what the pruned checkpoint is stored as, with the linear modules that have a bias in it.
        report: what the pruned checkpoint says of itself; None where another tool made it.
        rotated: the dense model in the basis of the pruned one's hidden states, where that was rotated.
        beside: the dense model, without the blocks that are gone.
        leaps: how far the whole one runs beside that, where some are.
    """

    request: RecoveryJob
    container: Container
    report: Report | None
    rotated: RotatedCheckpoint | None
    beside: Model
    leaps: KeptBlocks | None = None

    @property
    def doubt(self) -> str | None:
        """A line where the two models look like a slip: the same, or not the one the pruned one says it is from."""
        pruned, dense = self.request.pruned.checkpoint, self.request.dense.checkpoint
        if pruned.fingerprint == dense.fingerprint:
            return f"{pruned.path} and {dense.path} are the same model: there is nothing to recover"
        if self.report is None or self.report.source.fingerprint == dense.fingerprint:
            return None
        return (
            f"{pruned.path} says it was made from another model ({self.report.source.name}) than {dense.path}: "
            "right where it was pruned more than once, else give the dense model it was made from"
        )

    @cached_property
    def dense(self) -> ModelView:
        """The dense model in the basis of the pruned one. Masks leave shapes alone: it is built as that one is."""
        container = None if self.rotated is None else self.container
        return ModelView(self.beside, self.request.device, self.rotated, container, self.leaps)

    @property
    def pruned(self) -> ModelView:
        """The pruned model."""
        return ModelView(self.request.pruned, self.request.device, container=self.container)

    def recoverer(self) -> Recoverer:
        """What recovers blocks, at the first one."""
        request = self.request
        split = SampleSplit.of(len(request.samples), request.settings.held_out)
        how: dict[str, Any] = {"allocate": request.allocate, "group": process_group()}
        sizes = split.sizes(request.settings, process_group())
        pruned = self.pruned.stream(request.samples, request.compute_dtype, sizes=sizes, **how)
        dense = self.dense.stream(request.samples, request.compute_dtype, **how)
        return Recoverer(
            dense, self.dense.block, pruned, split, request.settings, request.seed, request.after, request.allocate
        )

    @property
    def digest(self) -> str:
        """sha256 of all that the output depends on."""
        request = self.request
        parts = [
            __version__,
            "recover",
            _JOURNAL,
            request.pruned.checkpoint.fingerprint,
            request.dense.checkpoint.fingerprint,
            request.settings.model_dump(mode="json"),
            request.samples.fingerprint,
            request.seed,
            str(request.compute_dtype),
            request.device.type,
            sorted(request.after),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def prepare_recovery(request: RecoveryJob) -> PreparedRecovery:
    """Check everything there is to check before hidden states are made.

    Raises:
        UserError: the two models do not belong together, or the settings do not suit them.
    """
    # It is added to when all is done: damaged, it would cost all the training.
    report = report_of(request.pruned.checkpoint.path)
    beside, leaps = at_same_depth(request.pruned, request.dense, report)
    check_models(request.pruned, beside, WHY)
    check_trainable(len(request.samples))
    request.settings.blocks(request.pruned.blocks)
    rotated = rotated_as(request.pruned, request.dense, request.device, report)
    return PreparedRecovery(request, container_of(request.pruned), report, rotated, beside, leaps)


def recover(
    settled: PreparedRecovery,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    announce: Announce = say_nothing,
) -> Report:
    """Train what a pruned checkpoint has left, block by block, into a copy of it (LaCo, Algorithm 1).

    Shapes, dtypes, names, zeros and all that is outside the blocks' linear modules stay as they are. The output is
    written to `OUT.partial` and renamed at the end.

    Args:
        settled: what to do.
        out: the folder to write.
        resume: continue an interrupted run of the same request, with the same result.
        overwrite: replace an existing output, or start an interrupted one afresh.
        announce: told what is doubtful about the models, what is about to be done and what is gone on with.

    Returns:
        The report, as in the output's ckpt_prune.json.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    request = settled.request
    pruned, dense = request.pruned.checkpoint, request.dense.checkpoint
    group = process_group()
    group.check_enough(len(request.samples))
    group.agree(
        {
            "model": pruned.fingerprint,
            "dense model": dense.fingerprint,
            "text" if request.dense.family.modality == "text" else "set of images": request.samples.fingerprint,
            "job": settled.digest,
        }
    )
    with open_run(
        settled.digest,
        out,
        [pruned, dense],
        device=request.device,
        wants=wanted_names(pruned),
        doing="recovered",
        blocks=request.pruned.blocks,
        resume=resume,
        overwrite=overwrite,
        announce=announce,
    ) as run:
        if run.report is not None:
            return run.report
        store = run.open_copy(request.pruned)
        with run.stages.stage("hidden states"):
            step = RecoverStep(settled.recoverer())
        for line in filter(None, [settled.doubt, step.recoverer.summary]):
            announce(line)
        with run.stages.stage("blocks"):
            layers = walk(settled.dense, {Recovery.key: step}, store, read=request.pruned.read_block)[Recovery.key]
        run.write_rest(settled.pruned)
        recovery = recovery_of(step.recoverer, dense, on_the_fly=False)

        def finish() -> Report:
            report = report_of_recovery(
                settled.report, request.pruned, request.dense, settled.container, recovery, layers
            )
            return publish_copy(run, request.pruned, settled.container, report)

        return group.once(finish)
