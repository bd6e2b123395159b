"""Running what is settled: blocks through the steps into the writer, then config, report and model card."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_prune.calibration.sources import MomentSource, SequentialMoments
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.checkpoint.staging import SCRATCH, Staging, partial_of, refuse_overlap
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.errors import UserError
from ckpt_prune.parallel.group import here
from ckpt_prune.phases import phase
from ckpt_prune.planning.plan import SitePlan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.records import FactoredLinear, MaskedLinear, MaskShares
from ckpt_prune.progress import meter
from ckpt_prune.recovery.record import RecoveredLayer
from ckpt_prune.recovery.recoverer import Recoverer
from ckpt_prune.recovery.training import Split
from ckpt_prune.report.model import Adapters, Recovery, Report, StrengthSearch
from ckpt_prune.report.stages import Stages
from ckpt_prune.rotations.learning import WrittenRotations
from ckpt_prune.transform.checks import check_together, check_trained
from ckpt_prune.transform.depth import at_chosen_depth
from ckpt_prune.transform.hidden import at_narrow_stream
from ckpt_prune.transform.layout import with_rest
from ckpt_prune.transform.mask_shares import shared_out
from ckpt_prune.transform.measuring import measured
from ckpt_prune.transform.publish import publish, publish_complete, wanted_names
from ckpt_prune.transform.reporting import recovery_of, report_of_prune
from ckpt_prune.transform.rescaling import SCALES, rescaled
from ckpt_prune.transform.resuming import Announce, announce_resumed, finished, silent
from ckpt_prune.transform.rotating import InTurn, learner_of
from ckpt_prune.transform.settle import Settled
from ckpt_prune.transform.steps import FollowStep, PruneStep, RecoverStep, Step
from ckpt_prune.transform.walk import Sink, validated, walk

Records = Sequence[SitePlan | MaskedLinear | FactoredLinear]
"""What was done: to spaces that lost units, or to linears that got zeros or became two."""
_MOST_NLL = 700.0
"""The exponential of more is not finite."""


def search_strength(settled: Settled) -> StrengthSearch:
    """Choose the strength by the perplexity of the pruned model on the calibration text (RCPU 7.1).

    The model is pruned once per value, block by block, nothing is written; ties go to the larger value, which stays
    nearer to the kept weights. A perplexity that is not finite is never chosen and stands as None in the result.

    Raises:
        UserError: no value of the grid gives a finite perplexity.
    """
    grid = settled.recipe.perplexity_grid
    assert grid is not None
    found: dict[float, float | None] = {}
    for strength in grid:
        trial = settled.with_strength(strength)
        trial = replace(trial, request=replace(trial.request, diagnostics=False))
        source = trial.moments()
        steps: list[Step] = [PruneStep(trial.engine(), source)]
        stream = _followed(trial, source, steps)
        walk(trial.dense, steps, say=f"trying lambda {strength:g}")
        nll = stream.nll()
        found[strength] = math.exp(nll) if nll < _MOST_NLL else None
    finite = {strength: value for strength, value in found.items() if value is not None}
    if not finite:
        tried = ", ".join(f"{strength:g}" for strength in found)
        raise UserError(
            f"no lambda of the grid ({tried}) gives a finite perplexity on the calibration text: "
            "drop less, or try other values with lambda_grid"
        )
    chosen = min(finite, key=lambda value: (finite[value], -value))
    return StrengthSearch(chosen=chosen, perplexity={f"{strength:g}": value for strength, value in found.items()})


@dataclass(frozen=True)
class Done:
    """What a run has made.

    Attributes:
        settled: with everything that was decided while it ran.
        report: as in the output's ckpt_prune.json.
        finished: whether an earlier run had done all of it; then the job is as it was before it was measured.
    """

    settled: Settled
    report: Report
    finished: bool = False


def run(
    settled: Settled, out: Path, *, resume: bool = False, overwrite: bool = False, announce: Announce = silent
) -> Done:
    """Prune a checkpoint into a folder that stock transformers loads.

    What the recipe needs measured is measured first. The output is written to `OUT.partial` and renamed at the end.
    Of several processes the first one writes.

    Args:
        settled: what to do. A strength that is to be chosen by perplexity is searched here.
        out: the folder to write.
        resume: continue an interrupted run of the same request; the result is byte-identical to an uninterrupted one.
        overwrite: replace an existing output, or start an interrupted one afresh.
        announce: told in a line what is gone on with, or that there is nothing to do.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    check_trained(settled.request)
    checkpoint, group = settled.model.checkpoint, here()
    refuse_overlap(checkpoint.path, out)
    check_together(settled.request, settled.digest)
    report = group.once(lambda: finished(out, settled.digest, announce) if resume and not overwrite else None)
    if report is not None:
        return Done(settled, report, finished=True)

    def begin() -> Staging:
        staging = Staging(
            out,
            job=settled.digest,
            resume=resume,
            overwrite=overwrite,
            wants=wanted_names(checkpoint, settled.recipe),
        )
        if resume:
            announce_resumed(staging, out, settled.model.blocks, _done_to(settled.recipe), announce)
        if not staging.resumed:
            checkpoint.check_finite()
        return staging

    staging = group.at_first(begin)
    stages = Stages(settled.request.device)
    with nullcontext() if staging is None else staging:
        journal = None if staging is None else staging.journal

        def complete() -> Report | None:
            return publish_complete(staging, announce) if staging is not None and staging.journal.complete else None

        report = group.once(complete)
        if report is not None:
            return Done(settled, report, finished=True)
        # `check_together`: one process alone chooses blocks, or bases of the stream.
        shorter = settled if staging is None else at_chosen_depth(settled, staging.scratch, staging.journal, stages)
        if staging is not None:
            shorter = at_narrow_stream(shorter, staging.scratch, staging.journal, stages)
        ready = measured(shorter, partial_of(out) / SCRATCH, journal, stages)
        # Found by each process for itself, of what the first one has measured.
        group.agree({"choice of widths": ready.widths})
        return Done(ready, _run(ready, staging, stages, announce))


def _done_to(recipe: Recipe) -> str:
    """What becomes of a block, in a word."""
    if recipe.low_rank is not None:
        return "factored"
    return "pruned" if recipe.mask is None else "masked"


def _writer_of(settled: Settled, staging: Staging) -> CheckpointWriter:
    output, checkpoint = settled.output, settled.model.checkpoint
    layout, names = with_rest(checkpoint, output.layout)
    return CheckpointWriter(
        staging,
        layout | output.aside,
        sharded=checkpoint.sharded,
        aside=output.aside.keys(),
        transposed=checkpoint.transposed,
        names=names,
        stacks=checkpoint.stacks,
    )


def _run(settled: Settled, staging: Staging | None, stages: Stages, announce: Announce) -> Report:
    output, checkpoint = settled.output, settled.model.checkpoint
    writer = None if staging is None else _writer_of(settled, staging)
    search = _searched(settled, writer, stages)
    ready = settled if search is None else settled.with_strength(search.chosen)
    ready = replace(ready, shares=_shared_out(ready, writer, stages))
    learned = in_turn = None
    if ready.recipe.rotation is not None:
        assert writer is not None  # `check_together`: one process alone
        if ready.recipe.rotates_in_turn and ready.request.sequential:
            in_turn = InTurn(ready, writer)
            ready = replace(ready, rotations=in_turn)
        else:
            with stages.stage("rotations"):
                learner = learner_of(ready)
                learned = learner.run(writer)
            ready = replace(ready, rotations=WrittenRotations(writer.read, learner.sizes))
    padded = output.container.padded
    narrow = [{space: count for space, count in own.items() if space not in padded} for own in ready.widths]
    sink = Sink(writer, output.layout, narrow if ready.recipe.spaces else None)
    with stages.stage("blocks"):
        written = _write_blocks(ready, sink, in_turn)
    if in_turn is not None:
        learned = in_turn.learned
    with stages.stage("rest"):
        sink.write_rest(ready.dense)
        sink.write_outer(checkpoint)
    scales: Adapters | None = None
    if _scales(ready.recipe):
        scales = here().alone(lambda: rescaled(ready, sink, stages, announce))

    def end() -> Report:
        assert writer is not None
        report = report_of_prune(
            ready,
            written.records,
            search=search,
            learned=learned,
            recovery=written.recovery,
            layers=written.layers,
            scales=scales,
        )
        return publish(writer, report, output.container, checkpoint, [*output.layout, *output.aside], stages, announce)

    return here().once(end)


def _searched(settled: Settled, writer: CheckpointWriter | None, stages: Stages) -> StrengthSearch | None:
    """The strength of least calibration perplexity, where it is to be searched; found once, also when resumed."""
    if not settled.recipe.perplexity_grid or settled.request.plan is not None:
        return None
    note = here().once(lambda: None if writer is None else writer.notes.get("search"))
    if note is not None:
        return StrengthSearch.model_validate(note)
    with stages.stage("lambda search"):
        search = search_strength(settled)
    if writer is not None:
        writer.commit("search", note=search.model_dump())
    return search


def _shared_out(settled: Settled, writer: CheckpointWriter | None, stages: Stages) -> MaskShares | None:
    """How a mask's zeros are shared out over blocks; found once, also when resumed. None where all have as many."""
    mask = settled.recipe.mask
    if mask is None or mask.allocation == "uniform":
        return None
    assert writer is not None  # `check_together`: one process alone
    if "shares" not in writer.notes:
        with stages.stage("shares"):
            writer.commit("shares", note=shared_out(settled).model_dump())
    return MaskShares.model_validate(writer.notes["shares"])


def _scales(recipe: Recipe) -> bool:
    """Whether all blocks are recovered at the end, rather than each right after it is pruned."""
    return recipe.recovery is not None and recipe.recovery.method == "scales"


@dataclass(frozen=True)
class _Written:
    """What became of the blocks.

    Attributes:
        records: of what was pruned.
        recovery, layers: how blocks were recovered, where they were.
    """

    records: Records
    recovery: Recovery | None = None
    layers: Sequence[RecoveredLayer] = ()


def _write_blocks(settled: Settled, sink: Sink, in_turn: InTurn | None = None) -> _Written:
    """Let the recipe's steps act on every block, and write it.

    Args:
        settled: the job, its rotations learned, or learned as they are asked for.
        sink: where blocks go.
        in_turn: its rotations, where they are learned in turn.
    """
    dense = settled.dense
    with nullcontext() if in_turn is None else in_turn.shown():
        with phase("calibration"):
            source = settled.moments()
        pruned = PruneStep(settled.engine(), source)
        steps: list[Step] = [pruned]
        if in_turn is not None:
            in_turn.stream = _followed(settled, source, steps)
        say = "pruning" if in_turn is None else None
        if in_turn is None and here().once(lambda: sink.writer is not None and SCALES in sink.writer.notes):
            # Blocks may be half scaled, and all that is still asked of them is what was done to them.
            notes = [here().once(partial(sink.notes, block)) for block in range(dense.model.blocks)]
            return _Written([record for each in notes for record in validated([pruned], each)[pruned.name]])
        if settled.recipe.recovery is None or _scales(settled.recipe):
            apart = not isinstance(source, SequentialMoments) and in_turn is None
            return _Written(walk(dense, steps, sink, say=say, apart=apart)[pruned.name])
        recoverer = recoverer_of(settled)
        with meter(recoverer.epochs, "recovering", unit="epoch") as epochs:
            recovered = RecoverStep(recoverer, epochs)
            # Last, as it asks for the next dense block, whose rotations may be learned on what follows this one.
            records = walk(dense, [*steps, recovered], sink, say=say)
    recovery = recovery_of(recoverer, settled.model.checkpoint, on_the_fly=True)
    return _Written(records[pruned.name], recovery, records[recovered.name])


def _followed(settled: Settled, source: MomentSource, steps: list[Step]) -> HiddenStream:
    """Hidden states of the pruned model at the first block: those that moments are of, or others beside them."""
    if isinstance(source, SequentialMoments):
        return source.stream
    stream: HiddenStream = settled.live_stream(settled.dense)
    steps.append(FollowStep(stream))
    return stream


def recoverer_of(settled: Settled) -> Recoverer:
    """What recovers each block after it is pruned, at the first block."""
    training, recipe = settled.request.training, settled.recipe.recovery
    assert training is not None
    assert recipe is not None
    split, model = Split.of(len(training.samples), recipe.held_out), settled.dense
    how: dict[str, Any] = {"allocate": training.allocate, "group": here()}
    dense = model.stream(training.samples, training.compute_dtype, **how)
    pruned = model.stream(training.samples, training.compute_dtype, sizes=split.sizes(recipe, here()), **how)
    return Recoverer(dense, model.block, pruned, split, recipe, recipe.seed, training.after, training.allocate)
