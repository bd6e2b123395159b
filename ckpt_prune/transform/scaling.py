"""Recovering a pruned checkpoint by scales of its linear modules, fitted to the dense model's predictions."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from ckpt_prune.checkpoint.staging import Staging, refuse_overlap
from ckpt_prune.checkpoint.written import OUTPUT
from ckpt_prune.filenames import ROTATIONS
from ckpt_prune.recovery.scales import Fitted, Side
from ckpt_prune.recovery.training import Split
from ckpt_prune.report.model import Report
from ckpt_prune.report.stages import Stages
from ckpt_prune.transform.fitting_scales import fitted_scales
from ckpt_prune.transform.layout import layout_of
from ckpt_prune.transform.publish import publish, wanted_names
from ckpt_prune.transform.recover import SettledRecovery, writer_of
from ckpt_prune.transform.reporting import report_of_adapters
from ckpt_prune.transform.resuming import Announce
from ckpt_prune.transform.steps import Tensors
from ckpt_prune.transform.walk import Sink, walk


@dataclass(frozen=True)
class _ScaleStep:
    """Multiplies the scales of a block into its weights."""

    fitted: Fitted
    name = "scaled"

    @property
    def record(self) -> type[BaseModel]:
        """Nothing is noted of a block."""
        return BaseModel

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, Sequence[BaseModel]]:
        """Scale one block."""
        return self.fitted.applied(tensors), []

    def advance(self, block: int, tensors: Tensors) -> None:
        """Nothing depends on the block."""


def recover_by_scales(settled: SettledRecovery, out: Path, *, overwrite: bool, announce: Announce) -> Report:
    """Fit scales of the linear modules' outputs and inputs and write the model with them multiplied in.

    Shapes, dtypes, names and zeros stay.

    Args:
        settled: what to do.
        out: the folder to write.
        overwrite: replace an existing output.
        announce: told what is doubtful about the models, and whether anything was gained.

    Returns:
        The report, as in the output's ckpt_prune.json.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    request = settled.request
    pruned, dense, settings = request.pruned.checkpoint, request.dense.checkpoint, request.settings
    for source in (pruned, dense):
        refuse_overlap(source.path, out)
    layout = layout_of(request.pruned)
    digest = hashlib.sha256(json.dumps(["scales", settled.digest]).encode()).hexdigest()
    kind = replace(OUTPUT, left="asked")
    place = Staging(out, job=digest, overwrite=overwrite, kind=kind, wants=wanted_names(pruned))
    pruned.check_finite()
    dense.check_finite()
    if settled.doubt is not None:
        announce(settled.doubt)
    stages = Stages(request.device)
    ours = settled.pruned.stream(
        request.samples,
        request.compute_dtype,
        sizes=Split.of(len(request.samples), settings.held_out).sizes(settings),
        allocate=request.allocate,
    )
    theirs = settled.dense.stream(request.samples, request.compute_dtype, allocate=request.allocate)
    fitted, told = fitted_scales(
        Side(ours, request.pruned.read_block, request.pruned.blocks),
        Side(theirs, settled.dense.block, request.pruned.blocks),
        request.samples,
        settings,
        seed=request.seed,
        text=request.dense.family.modality == "text",
        seen=request.seen,
        stages=stages,
        announce=announce,
    )
    with place as staging:
        writer = writer_of(staging, pruned, layout)
        sink = Sink(writer, layout)
        with stages.stage("blocks"):
            walk(settled.pruned, [_ScaleStep(fitted)], sink, start=request.pruned.read_block, say="writing")
        with stages.stage("rest"):
            sink.write_rest(settled.pruned)
            sink.write_outer(pruned)
        asides = [ROTATIONS] if (pruned.path / ROTATIONS).is_file() else []
        for name in asides:
            writer.copy(pruned.path / name)
        report = report_of_adapters(settled.report, request.pruned, settled.container, told)
        return publish(writer, report, settled.container, pruned, [*layout, *asides], stages, announce)
