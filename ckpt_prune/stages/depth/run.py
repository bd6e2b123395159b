"""Dropping whole blocks: which, by what is measured, and the maps that make up for them (compensation, section 12)."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, HiddenRecord
from ckpt_prune.job.run import Run
from ckpt_prune.job.timing import PhaseTimer
from ckpt_prune.model.depth import output_tensors, shorten_model
from ckpt_prune.model.model import Model
from ckpt_prune.stages.depth.choice import choose_depth
from ckpt_prune.stages.depth.maps import fit_maps
from ckpt_prune.stages.depth.preview import at_depth, depth_of
from ckpt_prune.stages.hidden.run import HIDDEN, shared_basis, shared_gram
from ckpt_prune.stages.joint_counts.counts import BlockCountSearch, PairSearch, ranked_at
from ckpt_prune.stages.joint_counts.search import measure_unpruned

DEPTH = "depth"
"""Entry of the journal: which blocks go, and the maps in their place."""
_MAPS = "depth.safetensors"


def drop_blocks(prepared: Prepared, run: Run) -> Prepared:
    """Return the state of the model without the blocks that the recipe drops: every later stage sees it so."""
    journal, folder, timer = run.own_journal, run.scratch, run.timer
    with disk_failures(folder):
        folder.mkdir(exist_ok=True)
    weighing = _open_search(prepared, folder, journal, timer) if depth_of(prepared).auto else None

    def choose() -> DepthRecord:
        with timer.time("depth"):
            record = choose_depth(prepared, journal) if weighing is None else _find_counts(weighing, run)
            return _compensate(prepared, record, folder / _MAPS)

    record = run.remember(DEPTH, DepthRecord, choose)
    short = at_depth(prepared, record, _remaining_model(prepared.model, record, folder / _MAPS))
    if weighing is not None:
        # The widths are those that were tried. If all of the model stays, so do the statistics of it.
        known = None if record.gaps or isinstance(weighing, PairSearch) else weighing.statistics
        short = replace(short, ranked=ranked_at(weighing.ranking, record), statistics=known)
    return short


def _open_search(
    prepared: Prepared, folder: Path, journal: Journal, timer: PhaseTimer
) -> BlockCountSearch | PairSearch:
    """Return the search for the best number of blocks. The unpruned model is measured first if it was not."""
    statistics = measure_unpruned(prepared, folder / "whole", journal, timer)

    def shorten(few: Prepared, record: DepthRecord) -> tuple[DepthRecord, Model]:
        file = folder / f"without-{record.blocks - len(record.kept)}.safetensors"
        told = _compensate(few, record, file)
        return told, _remaining_model(few.model, told, file)

    with timer.time("ranking"):
        if not prepared.recipe.has("hidden"):
            return BlockCountSearch(prepared, statistics, choose_depth, shorten, journal)
        return PairSearch(prepared, statistics, choose_depth, shorten, shared_gram, shared_basis, journal)


def _find_counts(weighing: BlockCountSearch | PairSearch, run: Run) -> DepthRecord:
    """Find how many blocks go. If dimensions were tried with them, enter their number in the journal."""
    if isinstance(weighing, BlockCountSearch):
        return weighing.record()
    record, hidden = weighing.records()
    run.remember(HIDDEN, HiddenRecord, lambda: hidden)
    return record


def _compensate(prepared: Prepared, record: DepthRecord, file: Path) -> DepthRecord:
    """Fit maps for the blocks that go, write the tensors that change to a file, and return the record."""
    depth, gaps = depth_of(prepared), record.gaps
    found: dict[str, Tensor] = {}
    if depth.part != "block":
        found = _zeros(prepared.model, record)
    elif depth.compensation.linear and gaps:
        gaps, found = fit_maps(prepared, gaps)
    with disk_failures(file.parent):
        if found:
            save_file(found, file)
            sync(file)
    return record.model_copy(update={"gaps": gaps})


def _remaining_model(model: Model, record: DepthRecord, file: Path) -> Model:
    """Return the model without the blocks that go. If the file exists, its tensors replace the model's."""
    left = shorten_model(model, record.kept) if record.part == "block" else model
    if not file.is_file():
        return left
    maps = {name: replace(info, file=str(file)) for name, info in read_header(file).tensors.items()}
    return replace(left, checkpoint=replace(left.checkpoint, replaced=maps))


def _zeros(model: Model, record: DepthRecord) -> dict[str, Tensor]:
    """What stands in place of parts that are gone."""
    names = [name for gap in record.gaps for name in output_tensors(model, gap.first, record.part)]
    infos = model.checkpoint.tensors
    return {name: torch.zeros(infos[name].shape, dtype=infos[name].dtype) for name in names}
