"""Statistics of the dense model, measured first, in the staging folder of the run."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.disk_space import check_free_space
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import DiskError
from ckpt_prune.common.phases import phase
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.measure.samples.samples import SpreadSamples
from ckpt_prune.measure.statistics.end_states import EndStates
from ckpt_prune.measure.statistics.folder import Statistics, record_effects
from ckpt_prune.measure.statistics.measurement import check_folds, count_statistics_bytes, measure_into
from ckpt_prune.parallel.group import process_group
from ckpt_prune.stages.spaces.effects.gradients import add_gradients, gradient_rows
from ckpt_prune.stages.spaces.effects.measured import measure_effects, measured_singly

STATISTICS, EFFECTS = "statistics", "effects"
"""Entries of the journal: moments, and effects, of the whole model."""
LEAST_WINDOWS, TOKENS_PER_INPUT = 32, 8
"""Widths are decided on at least so many samples, and tokens for each input of the widest consumer."""
Choose = Callable[[Prepared], Prepared]
"""Returns the state with what goes decided, by statistics or without."""


def measure_dense(prepared: Prepared, run: Run) -> Prepared:
    """Return the state with statistics of the unpruned model, if the recipe needs them before the first block.

    They are measured on the live samples, or read if an interrupted run has measured them: for a recipe of target
    dense, for one rotation of all blocks, and for widths of the least error.
    """
    if not prepared.measures_first or prepared.live is None:
        return prepared
    with run.timer.time("measuring"), phase("calibration"):
        live = choose_samples(prepared, prepared.live)
        ends = plan_end_states(prepared, live, run.scratch)
        if ends is not None and not _are_usable(ends, prepared, live, run):
            ends = None  # the blocks run once more instead
        statistics = measure_first(prepared, live, run.scratch, run.journal, ends)
        return replace(prepared, statistics=statistics, ends=ends)


def choose_samples(prepared: Prepared, live: LiveSamples) -> LiveSamples:
    """Return the samples that the unpruned model is measured on: a part of them if that decides nothing but widths.

    Then what stays is fitted to all of them, behind the pruned blocks. A width is one number of a whole site, and
    needs less than the weights that are fitted at it.
    """
    only_widths = prepared.sequential and prepared.recipe.weighed_by_effect and not prepared.recipe.changes_model
    if not only_widths:
        return live
    samples = live.samples
    count = max(LEAST_WINDOWS, math.ceil(TOKENS_PER_INPUT * prepared.model.widest_consumer / samples.tokens))
    return replace(live, samples=SpreadSamples(samples, count)) if count < len(samples) else live


def plan_end_states(prepared: Prepared, live: LiveSamples, folder: Path) -> EndStates | None:
    """Return what to keep of the states behind the blocks of the unpruned model while it is measured on `live`.

    The states of all samples are kept if the drift from them is measured as well; else only of those that gradients
    are taken of. None if nothing needs them, or several processes share the samples.
    """
    recipe, model, count = prepared.recipe, prepared.model, len(live.samples)
    drifts = prepared.sequential and recipe.target == "drift" and not recipe.changes_model
    if process_group().size > 1:
        return None
    if drifts and live is prepared.live:
        rows = range(count)
    elif recipe.weighed_by_effect and prepared.ranked is None:
        rows = gradient_rows(model, count, live.folds)
    else:
        return None
    return EndStates(model, live.samples, rows, folder, live.compute_dtype)


def _are_usable(ends: EndStates, prepared: Prepared, live: LiveSamples, run: Run) -> bool:
    """Return whether states were kept while the statistics were measured, or there is room for both."""
    if run.journal is not None and STATISTICS in run.journal.entries:
        return ends.complete  # several processes may have begun this run, or the disk had no room
    try:
        check_free_space(run.scratch.parent, _count_bytes(prepared, live) + ends.bytes, "states behind blocks need")
    except DiskError:
        return False
    return True


def _count_bytes(prepared: Prepared, live: LiveSamples) -> int:
    return count_statistics_bytes(
        prepared.model, collect=prepared.recipe.collect, folds=live.folds, samples=len(live.samples)
    )


def measure_and_choose(prepared: Prepared, run: Run, choose: Choose) -> Prepared:
    """Measure the dense model if the recipe needs it, then decide what goes."""
    are_known = prepared.widths_known
    measured = measure_dense(prepared, run)
    with nullcontext() if are_known else run.timer.time("ranking"), phase("ranking"):
        return choose(measured)


def preview_choice(prepared: Prepared, choose: Choose) -> Prepared:
    """Decide what goes before the model is measured; one ratio everywhere stands for what measuring would find."""
    if prepared.widths_known:
        return choose(prepared)
    alike = choose(replace(prepared, recipe=prepared.recipe.at_one_ratio))
    # Widths of spaces may decide the container; ranks never do.
    shape_known = not prepared.recipe.spaces
    return replace(prepared, decided=alike.decided, planned=alike.planned, foreseen=True, shape_known=shape_known)


def measure_first(
    prepared: Prepared, live: LiveSamples, folder: Path, journal: Journal | None, ends: EndStates | None = None
) -> Statistics:
    """Measure moments of the unpruned model, and effects of errors on its output if widths are weighed by them.

    Args:
        folder: for the statistics; it is made.
        journal: of the run, to record finished work in; None if the work is not to be resumed.
        ends: keeps the states behind every block.
    """
    recipe, group = prepared.recipe, process_group()
    data: dict[str, Any] = {"device": prepared.device, "compute_dtype": live.compute_dtype, "allocate": live.allocate}
    done = group.once(lambda: set[str]() if journal is None else set(journal.entries))

    def make_folder() -> None:
        with disk_failures(folder):
            folder.mkdir(exist_ok=True)
        kept = 0 if ends is None else ends.bytes
        check_free_space(folder, _count_bytes(prepared, live) + kept, "statistics need")

    if STATISTICS in done:
        statistics = Statistics(folder)
    else:
        check_folds(live.samples, live.folds)
        group.on_first(make_folder)
        statistics = measure_into(
            prepared.model,
            live.samples,
            folder,
            seed=live.seed,
            folds=live.folds,
            collect=recipe.collect,
            **data,
            skeleton=None if prepared.stored is None else prepared.stored.skeleton(),
            journal=journal,
            see_stream=None if ends is None else lambda block, stream: ends.write(block, stream.states),
        )
        _record(journal, STATISTICS, [] if ends is None else ends.files)
    if not recipe.weighed_by_effect or prepared.ranked is not None:
        return statistics
    how = data | {"spaces": list(recipe.spaces)}
    if not statistics.index.fisher:
        # An interrupted pass back has to start at the last block again: the index tells only of the whole.
        with phase("gradients"):
            distances = prepared.job.recipe.at_its_size.changes_model
            statistics = add_gradients(prepared.model, statistics, live.samples, distances=distances, ends=ends, **how)
    if not measured_singly(prepared.model) or EFFECTS in done:
        return statistics
    with phase("effects"):
        effects = measure_effects(prepared.model, statistics, live.samples, journal=journal, **how)
    statistics = group.once(lambda: record_effects(statistics, effects))
    _record(journal, EFFECTS)
    return statistics


def _record(journal: Journal | None, entry: str, files: Iterable[Path] = ()) -> None:
    if journal is not None:
        with disk_failures(journal.folder):
            journal.record(entry, files=files)
