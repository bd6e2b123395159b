"""Dropping whole blocks: which, by what is measured, and the maps that make up for them (compensation, section 12)."""

from dataclasses import replace

from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.job.prepared import Prepared, RankedSites
from ckpt_prune.job.records import DepthRecord, HiddenRecord
from ckpt_prune.job.run import Run
from ckpt_prune.stages.depth.choice import choose_depth
from ckpt_prune.stages.depth.maps import compensate, remaining_model
from ckpt_prune.stages.depth.preview import at_depth, depth_of
from ckpt_prune.stages.hidden.run import HIDDEN
from ckpt_prune.stages.joint_counts.counts import BlockCountSearch, PairSearch, ranked_at
from ckpt_prune.stages.joint_counts.search import measure_unpruned

DEPTH = "depth"
"""Entry of the journal: which blocks go, and the maps in their place."""
_MAPS = "depth.safetensors"


def drop_blocks(prepared: Prepared, run: Run) -> Prepared:
    """Return the state of the model without the blocks that the recipe drops: every later stage sees it so."""
    folder = run.scratch
    with disk_failures(folder):
        folder.mkdir(exist_ok=True)
    search = _open_search(prepared, run) if depth_of(prepared).auto else None

    def choose() -> DepthRecord:
        with run.timer.time("depth"):
            record = choose_depth(prepared, run.own_journal) if search is None else _find_counts(search, run)
            return compensate(prepared, record, folder / _MAPS)

    record = run.remember(DEPTH, DepthRecord, choose, [folder / _MAPS])
    short = at_depth(prepared, record, remaining_model(prepared.model, record, folder / _MAPS))
    if search is not None:
        # The widths are those that were tried. If all of the model stays, so do the statistics of it.
        statistics = None if record.gaps or isinstance(search, PairSearch) else search.statistics
        short = replace(short.knowing(RankedSites(ranked_at(search.ranking, record))), statistics=statistics)
    return short


def _open_search(prepared: Prepared, run: Run) -> BlockCountSearch | PairSearch:
    """Return the search for the best number of blocks. The unpruned model is measured first if it was not."""
    statistics = measure_unpruned(prepared, run)
    with run.timer.time("ranking"):
        return (PairSearch if prepared.recipe.has("hidden") else BlockCountSearch)(prepared, statistics, run)


def _find_counts(search: BlockCountSearch | PairSearch, run: Run) -> DepthRecord:
    """Find how many blocks go. If dimensions were tried with them, enter their number in the journal."""
    if isinstance(search, BlockCountSearch):
        return search.record()
    record, hidden = search.records()
    run.remember(HIDDEN, HiddenRecord, lambda: hidden)
    return record
