"""Recover a pruned checkpoint by scales of its linear modules, fitted to the dense model's predictions."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from ckpt_prune.checkpoint.folder_kinds import OUTPUT_KIND
from ckpt_prune.job.report import Report
from ckpt_prune.job.run import Announce
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.job.walk import walk
from ckpt_prune.runner.open_run import open_run
from ckpt_prune.runner.publish import publish_copy, wanted_names
from ckpt_prune.runner.recover import PreparedRecovery
from ckpt_prune.stages.recovery.block_training import SampleSplit
from ckpt_prune.stages.recovery.fitting_scales import fitted_scales
from ckpt_prune.stages.recovery.reports import report_of_adapters
from ckpt_prune.stages.recovery.scales import FittedScales, ModelInBlocks, apply_scales
from ckpt_prune.stages.recovery.stage import Recovery


class _ScaleStep(Step):
    """Multiplies the scales of a block into its weights."""

    record = BaseModel

    def __init__(self, fitted: FittedScales) -> None:
        self._fitted = fitted

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, list[BaseModel]]:
        """Scale one block."""
        return apply_scales(tensors, self._fitted.scales), []


def recover_by_scales(settled: PreparedRecovery, out: Path, *, overwrite: bool, announce: Announce) -> Report:
    """Fit scales of the linear modules' outputs and inputs, and write the model with them multiplied in.

    Shapes, dtypes, names and zeros stay.

    Args:
        settled: what to do.
        out: the folder to write.
        overwrite: replace an existing output.
        announce: says a line to the user.

    Returns:
        The report, as in the output's ckpt_prune.json.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    job = settled.request
    pruned, dense, settings = job.pruned.checkpoint, job.dense.checkpoint, job.settings
    with open_run(
        hashlib.sha256(json.dumps(["scales", settled.digest]).encode()).hexdigest(),
        out,
        [pruned, dense],
        device=job.device,
        wants=wanted_names(pruned),
        doing="scaled",
        blocks=job.pruned.blocks,
        resume=False,
        overwrite=overwrite,
        announce=announce,
        kind=replace(OUTPUT_KIND, unfinished="asked"),
    ) as run:
        if settled.doubt is not None:
            announce(settled.doubt)
        sizes = SampleSplit.of(len(job.samples), settings.held_out).sizes(settings)
        ours = settled.pruned.stream(job.samples, job.compute_dtype, sizes=sizes, allocate=job.allocate)
        theirs = settled.dense.stream(job.samples, job.compute_dtype, allocate=job.allocate)
        fitted, adapters = fitted_scales(
            ModelInBlocks(ours, job.pruned.read_block, job.pruned.blocks),
            ModelInBlocks(theirs, settled.dense.block, job.pruned.blocks),
            job.samples,
            settings,
            seed=job.seed,
            text=job.dense.family.modality == "text",
            seen=job.seen,
            stages=run.stages,
            announce=announce,
        )
        store = run.open_copy(job.pruned)
        with run.stages.stage("blocks"):
            walk(settled.pruned, {Recovery.key: _ScaleStep(fitted)}, store, read=job.pruned.read_block, doing="writing")
        run.write_rest(settled.pruned)
        report = report_of_adapters(settled.report, job.pruned, settled.container, adapters)
        return publish_copy(run, job.pruned, settled.container, report)
