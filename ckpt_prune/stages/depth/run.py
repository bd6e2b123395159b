"""Dropping whole blocks: which, by what is measured, and the maps that make up for them (compensation, section 12)."""

from dataclasses import replace

from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.job.prepared import Prepared, RankedSites
from ckpt_prune.job.records import DepthRecord
from ckpt_prune.job.run import Run
from ckpt_prune.stages.depth.choice import choose_depth
from ckpt_prune.stages.depth.count_search import BlockCountSearch, ranked_at
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.depth.maps import compensate, remaining_model
from ckpt_prune.stages.depth.preview import at_depth
from ckpt_prune.stages.shared.count_search import measure_unpruned

DEPTH = "depth"
"""Entry of the journal: which blocks go, and the maps in their place."""
_MAPS = "depth.safetensors"


def drop_blocks(prepared: Prepared, run: Run) -> Prepared:
    """Return the state of the model without the blocks that the recipe drops: every later stage sees it so."""
    folder = run.scratch
    with disk_failures(folder):
        folder.mkdir(exist_ok=True)
    search = None
    if prepared.stage(Depth).auto:
        statistics = measure_unpruned(prepared, run)
        with run.timer.time("ranking"):
            search = BlockCountSearch(prepared, statistics, run)

    def choose() -> DepthRecord:
        with run.timer.time("depth"):
            record = choose_depth(prepared, run.own_journal) if search is None else search.record()
            return compensate(prepared, record, folder / _MAPS)

    record = run.remember(DEPTH, DepthRecord, choose, [folder / _MAPS])
    short = at_depth(prepared, record, remaining_model(prepared.model, record, folder / _MAPS))
    if search is not None:
        # The widths are those that were tried. If all of the model stays, so do the statistics of it.
        ranked = RankedSites(ranked_at(search.ranking, record))
        short = replace(short.knowing(ranked), statistics=None if record.gaps else statistics)
    return short
