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
from ckpt_prune.stages.depth.choice import chosen_depth
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
    weighing = _weighing(prepared, folder, journal, timer) if depth_of(prepared).auto else None

    def choose() -> DepthRecord:
        with timer.time("depth"):
            record = chosen_depth(prepared, journal) if weighing is None else _weighed(weighing, run)
            return _made_up_for(prepared, record, folder / _MAPS)

    record = run.remember(DEPTH, DepthRecord, choose)
    short = at_depth(prepared, record, _left(prepared.model, record, folder / _MAPS))
    if weighing is not None:
        # The widths are those that were tried. If all of the model stays, so do the statistics of it.
        known = None if record.gaps or isinstance(weighing, PairSearch) else weighing.statistics
        short = replace(short, ranked=ranked_at(weighing.ranking, record), statistics=known)
    return short


def _weighing(prepared: Prepared, folder: Path, journal: Journal, timer: PhaseTimer) -> BlockCountSearch | PairSearch:
    """What numbers of blocks are held against each other by: the unpruned model is measured, where it was not."""
    statistics = measure_unpruned(prepared, folder / "whole", journal, timer)

    def shorten(few: Prepared, record: DepthRecord) -> tuple[DepthRecord, Model]:
        file = folder / f"without-{record.blocks - len(record.kept)}.safetensors"
        told = _made_up_for(few, record, file)
        return told, _left(few.model, told, file)

    with timer.time("ranking"):
        if not prepared.recipe.has("hidden"):
            return BlockCountSearch(prepared, statistics, chosen_depth, shorten, journal)
        return PairSearch(prepared, statistics, chosen_depth, shorten, shared_gram, shared_basis, journal)


def _weighed(weighing: BlockCountSearch | PairSearch, run: Run) -> DepthRecord:
    """Which blocks go; how many dimensions of the stream stay, where that was weighed with it, is kept for later."""
    if isinstance(weighing, BlockCountSearch):
        return weighing.record()
    record, hidden = weighing.records()
    run.remember(HIDDEN, HiddenRecord, lambda: hidden)
    return record


def _made_up_for(prepared: Prepared, record: DepthRecord, file: Path) -> DepthRecord:
    """The record of what makes up for blocks that go; the tensors of the output that this changes go into a file."""
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


def _left(model: Model, record: DepthRecord, file: Path) -> Model:
    """What stays of a model, with the tensors of a file in place of its own where there is one."""
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
