"""Recovering a pruned checkpoint by scales of its linear modules, fitted to the dense model's predictions."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ckpt_prune.checkpoint.staging import Staging, refuse_overlap
from ckpt_prune.checkpoint.units import counted
from ckpt_prune.checkpoint.written import OUTPUT
from ckpt_prune.filenames import ROTATIONS
from ckpt_prune.planning.recovery_recipe import RecoverySettings
from ckpt_prune.progress import meter
from ckpt_prune.recovery.scales import RATE, Fitted, Side, fit_scales
from ckpt_prune.recovery.training import Split
from ckpt_prune.report.model import Adapters, Report
from ckpt_prune.report.stages import Stages
from ckpt_prune.transform.layout import layout_of
from ckpt_prune.transform.publish import publish, wanted_names
from ckpt_prune.transform.recover import SettledRecovery, writer_of
from ckpt_prune.transform.reporting import report_of_adapters
from ckpt_prune.transform.resuming import Announce
from ckpt_prune.transform.walk import Sink, walk


@dataclass(frozen=True)
class _ScaleStep:
    """Multiplies the scales of a block into its weights."""

    fitted: Fitted
    name = "scaled"
    replays = False

    def act(self, block: int, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Scale one block."""
        return self.fitted.applied(tensors), {}

    def skip(self, block: int, dense: Any, tensors: Any, written: Any, note: Any, *, again: bool) -> Any:
        """No run goes on with what another one has fitted."""
        raise NotImplementedError

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
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
    announce(_summary(settled))
    stages = Stages(request.device)
    with stages.stage("training"), meter(settings.epochs, "fitting scales", unit="epoch") as epochs:
        fitted = _fitted(settled, settings, lambda epoch, loss: epochs.step(epoch, loss))
    if not fitted.scales:
        announce(
            f"no epoch was better than the model as it was, at lr {fitted.rate:g}: the weights stay as they are; try a "
            "smaller --lr, or more samples"
        )
    told = Adapters(
        method="scales",
        lr=fitted.rate,
        seed=request.seed,
        settings=settings.model_dump(mode="json", exclude={"lr"}),
        data=request.samples.fingerprint,
        samples=len(request.samples),
        window=request.samples.tokens if request.dense.family.modality == "text" else None,
        measured=len(Split.of(len(request.samples), settings.held_out).measured),
        modules=len(fitted.scales),
        parameters=fitted.parameters,
        steps=fitted.steps,
        epochs=fitted.epochs,
        seconds=round(fitted.seconds, 3),
        loss_before=fitted.before,
        loss_after=fitted.after,
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


def _summary(settled: SettledRecovery) -> str:
    """What is about to be done."""
    samples, settings = settled.request.samples, settled.request.settings
    split = Split.of(len(samples), settings.held_out)
    text = settled.request.dense.family.modality == "text"
    what = f"windows of {samples.tokens} tokens" if text else "samples"
    held = f"{len(split.measured)} of them held out" if settings.held_out else "none held out"
    rate = RATE if settings.lr is None else settings.lr
    blocks = len(settings.blocks(settled.request.pruned.blocks))
    return (
        f"fitting scales of {counted(blocks, 'block')} on {len(samples)} {what}, {held}, "
        f"up to {counted(settings.epochs, 'epoch')} in steps of {settings.batch} at lr {rate:g}"
    )


def _fitted(settled: SettledRecovery, settings: RecoverySettings, told: Any) -> Fitted:
    request = settled.request
    split = Split.of(len(request.samples), settings.held_out)
    sizes = split.sizes(settings)
    ours = settled.pruned.stream(request.samples, request.compute_dtype, sizes=sizes, allocate=request.allocate)
    theirs = settled.dense.stream(request.samples, request.compute_dtype, allocate=request.allocate)
    blocks = request.pruned.blocks
    return fit_scales(
        Side(ours, request.pruned.read_block, blocks),
        Side(theirs, settled.dense.block, blocks),
        request.samples,
        split,
        settings,
        seed=request.seed,
        told=told,
    )
