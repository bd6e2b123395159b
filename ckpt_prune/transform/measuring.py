"""Statistics for a request that is given data and needs them: measured first, in the staging folder of the run."""

from dataclasses import replace
from pathlib import Path

from ckpt_prune.calibration.measure import check_folds, measure_into, statistics_bytes
from ckpt_prune.calibration.statistics import Statistics, with_effects
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.checkpoint.writing import check_room
from ckpt_prune.parallel.group import here
from ckpt_prune.phases import phase
from ckpt_prune.report.stages import Stages
from ckpt_prune.transform.gradients import add_gradients
from ckpt_prune.transform.measured_effects import measure_effects, measured_singly
from ckpt_prune.transform.request import LiveSamples, Request
from ckpt_prune.transform.settle import Settled, settle

STATISTICS, EFFECTS = "statistics", "effects"
"""Units of the journal: moments, and effects, of the whole model."""


def measured(settled: Settled, folder: Path, journal: Journal | None, stages: Stages | None = None) -> Settled:
    """The job with all the moments it needs, its widths decided.

    A recipe that is sequential, needs no moments or has its statistics is passed on as it is. The unpruned model is
    measured on the live samples for a dense recipe, for one rotation of all blocks and for widths of the least error;
    what an interrupted run has measured is read.

    Args:
        settled: what to do.
        folder: where to measure; it is made. The job needs it as long as it is worked on.
        journal: of the run; None in a process that does not write.
        stages: of the run, to which measuring is added, and ranking where widths are found by it.

    Raises:
        UserError: what is decided by what was measured does not fit together.
    """
    request = settled.request
    if not request.measures_first or request.live is None:
        return settled
    stages = stages or Stages(request.device)
    with stages.stage("measuring"), phase("calibration"):
        statistics = measure_first(request, request.live, folder, journal)
    ready = replace(request, statistics=statistics)
    if settled.known is not None:
        return settle(ready)
    with stages.stage("ranking"), phase("ranking"):  # widths are chosen by what units are worth
        return settle(ready)


def measure_first(request: Request, live: LiveSamples, folder: Path, journal: Journal | None) -> Statistics:
    """Moments of the unpruned model, and what errors do to its output where widths are weighed by that.

    Args:
        request: what to measure for.
        live: samples.
        folder: where; it is made.
        journal: of the run, in which what is done is entered; None where it is not to be gone on with.
    """
    recipe, group = request.recipe, here()
    known = group.once(lambda: set[str]() if journal is None else set(journal.units))

    def make_folder() -> None:
        with disk_failures(folder):
            folder.mkdir(exist_ok=True)
        needed = statistics_bytes(request.model, collect=recipe.collect, folds=live.folds, samples=len(live.samples))
        check_room(folder, needed, "statistics need")

    if STATISTICS in known:
        statistics = Statistics(folder)
    else:
        check_folds(live.samples, live.folds)
        group.at_first(make_folder)
        statistics = measure_into(
            request.model,
            live.samples,
            folder,
            seed=live.seed,
            folds=live.folds,
            collect=recipe.collect,
            device=request.device,
            compute_dtype=live.compute_dtype,
            allocate=live.allocate,
            skeleton=None if request.stored is None else request.stored.skeleton(),
            journal=journal,
        )
        _done(journal, STATISTICS)
    if not recipe.weighed_by_effect or request.ranked is not None:
        return statistics
    if not statistics.index.fisher:
        # An interrupted pass back has to start at the last block again: the index tells only of the whole.
        statistics = add_gradients(
            request.model,
            statistics,
            live.samples,
            device=request.device,
            compute_dtype=live.compute_dtype,
            spaces=list(recipe.spaces),
            allocate=live.allocate,
        )
    if not measured_singly(request.model) or EFFECTS in known:
        return statistics
    effects = measure_effects(
        request.model,
        statistics,
        live.samples,
        spaces=list(recipe.spaces),
        device=request.device,
        compute_dtype=live.compute_dtype,
        allocate=live.allocate,
        journal=journal,
    )
    statistics = group.once(lambda: with_effects(statistics, effects))
    _done(journal, EFFECTS)
    return statistics


def _done(journal: Journal | None, unit: str) -> None:
    if journal is None:
        return
    with disk_failures(journal.folder):
        journal.record(unit)
