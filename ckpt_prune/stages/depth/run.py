"""Dropping whole blocks: which, by what is measured, and the maps that make up for them (compensation, section 12)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.compensation.gap import GapMap, absorb_map, fit_map
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, GapRecord, HiddenRecord
from ckpt_prune.job.run import Run
from ckpt_prune.job.timing import Stages
from ckpt_prune.measure.samples.samples import SampleRange
from ckpt_prune.measure.statistics.distances import SAMPLES, Distances, measure_distances
from ckpt_prune.measure.statistics.fisher import LIMITS
from ckpt_prune.model.depth import check_shortened, output_tensors, shorten_model
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Kind
from ckpt_prune.stages.depth.gaps import find_map_spaces, observe_gap
from ckpt_prune.stages.depth.losses import LOSS_TOKENS, measure_losses_without
from ckpt_prune.stages.depth.part_distances import measure_part_distances
from ckpt_prune.stages.depth.preview import Wanted, at_depth, depth_of, depth_record, wanted_depth
from ckpt_prune.stages.depth.runs import least_blocks, least_runs
from ckpt_prune.stages.hidden.run import HIDDEN, shared_basis, shared_gram
from ckpt_prune.stages.joint_counts.counts import BlockCountSearch, PairSearch, ranked_at
from ckpt_prune.stages.joint_counts.search import measure_unpruned

DEPTH = "depth"
"""Unit of the journal: which blocks go, and the maps in their place."""
_REMOVED = "removal"
"""Before the number of a block that the loss chose, of units of the journal."""
_MAPS = "depth.safetensors"


def drop_blocks(prepared: Prepared, run: Run) -> Prepared:
    """Return the state of the model without the blocks that the recipe drops: every later stage sees it so."""
    journal, folder, stages = run.own_journal, run.scratch, run.stages
    with disk_failures(folder):
        folder.mkdir(exist_ok=True)
    weighing = _weighing(prepared, folder, journal, stages) if depth_of(prepared).auto else None

    def choose() -> DepthRecord:
        with stages.stage("depth"):
            record = chosen_depth(prepared, journal) if weighing is None else _weighed(weighing, run)
            return _made_up_for(prepared, record, folder / _MAPS)

    record = run.remember(DEPTH, DepthRecord, choose)
    short = at_depth(prepared, record, _left(prepared.model, record, folder / _MAPS))
    if weighing is not None:
        # The widths are those that were tried. If all of the model stays, so do the statistics of it.
        known = None if record.gaps or isinstance(weighing, PairSearch) else weighing.statistics
        short = replace(short, ranked=ranked_at(weighing.ranking, record), statistics=known)
    return short


def _weighing(prepared: Prepared, folder: Path, journal: Journal, stages: Stages) -> BlockCountSearch | PairSearch:
    """What numbers of blocks are held against each other by: the unpruned model is measured, where it was not."""
    statistics = measure_unpruned(prepared, folder / "whole", journal, stages)

    def shorten(few: Prepared, record: DepthRecord) -> tuple[DepthRecord, Model]:
        file = folder / f"without-{record.blocks - len(record.kept)}.safetensors"
        told = _made_up_for(few, record, file)
        return told, _left(few.model, told, file)

    with stages.stage("ranking"):
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
        gaps, found = _mapped(prepared, gaps)
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


def chosen_depth(prepared: Prepared, journal: Journal | None = None) -> DepthRecord:
    """Which blocks go, and what is known of the gaps that they leave; nothing makes up for these yet.

    Args:
        prepared: of a recipe that drops blocks.
        journal: of the run, where blocks that were chosen one by one are entered.
    """
    if prepared.plan is not None:
        assert prepared.plan.depth is not None
        return prepared.plan.depth
    gone, distances = _chosen(prepared, journal)
    record = depth_record(prepared.model, gone, depth_of(prepared))
    if record.part == "block":
        check_shortened(prepared.model, record.kept)
    return record.model_copy(update={"gaps": [_with_distances(gap, distances) for gap in record.gaps]})


def drop_planned_blocks(prepared: Prepared) -> Prepared:
    """Return the state without the blocks that the recipe drops, for a plan: no map is fitted."""
    return at_depth(prepared, chosen_depth(prepared)) if prepared.recipe.has("depth") else prepared


def _chosen(prepared: Prepared, journal: Journal | None) -> tuple[list[int], Distances | None]:
    """The blocks that go, ascending, and what was measured of all runs to choose them."""
    depth, wanted = depth_of(prepared), wanted_depth(prepared)
    if depth.choice is None or not wanted.count:
        return list(wanted.allowed[: wanted.count]), None
    if depth.choice == "loss":
        return _by_loss(prepared, wanted, journal), None
    if depth.part != "block":
        return _parts(prepared, wanted)
    distances = _distances(prepared, gradients=depth.choice == "divergence")
    if depth.choice == "influence":
        costs = [distances.cosine[block][block + 1] for block in range(prepared.model.blocks)]
        return least_blocks(costs, wanted.count, wanted.allowed), distances
    matrix = distances.divergence if depth.choice == "divergence" else distances.cosine
    assert matrix is not None
    found = least_runs(matrix, wanted.count, depth.most_runs, wanted.allowed)
    if found is None:
        raise UserError(
            f"recipe {prepared.recipe.name} has no {wanted.count} blocks to drop in {depth.most_runs} run(s): say more "
            "depth.runs, or drop fewer"
        )
    return found, distances


def _by_loss(prepared: Prepared, wanted: Wanted, journal: Journal | None) -> list[int]:
    """The blocks that go one after the other, each the one without which the loss is least; of equal ones the first."""
    live = _live(prepared)
    some = SampleRange(live.samples, 0, min(len(live.samples), max(1, LOSS_TOKENS // live.samples.tokens)))
    units = {} if journal is None else journal.notes
    gone = [block for unit, block in units.items() if unit.startswith(f"{_REMOVED} ")]
    while len(gone) < wanted.count:
        losses = measure_losses_without(
            prepared.model,
            some,
            gone,
            set(wanted.allowed) - set(gone),
            device=prepared.device,
            compute_dtype=live.compute_dtype,
            allocate=live.allocate,
            part=depth_of(prepared).part,
        )
        gone.append(min(losses, key=lambda block: (losses[block], block)))
        if journal is not None:
            with disk_failures(journal.folder):
                journal.record(f"{_REMOVED} {len(gone)}", note=gone[-1])
    return sorted(gone)


def _parts(prepared: Prepared, wanted: Wanted) -> tuple[list[int], Distances]:
    """The blocks whose part does least, each by itself."""
    live, depth = _live(prepared), depth_of(prepared)
    gradients = depth.choice == "divergence"
    found = measure_part_distances(
        prepared.model,
        _some(prepared, gradients=gradients),
        depth.part,
        device=prepared.device,
        compute_dtype=live.compute_dtype,
        gradients=gradients,
        allocate=live.allocate,
    )
    costs = found.cosine if found.divergence is None else found.divergence
    return least_blocks(costs, wanted.count, wanted.allowed), found.distances


def _zeros(model: Model, record: DepthRecord) -> dict[str, Tensor]:
    """What stands in place of parts that are gone."""
    names = [name for gap in record.gaps for name in output_tensors(model, gap.first, record.part)]
    infos = model.checkpoint.tensors
    return {name: torch.zeros(infos[name].shape, dtype=infos[name].dtype) for name in names}


def _some(prepared: Prepared, *, gradients: bool) -> SampleRange:
    """The samples that blocks are compared on."""
    samples = _live(prepared).samples
    most = LIMITS[prepared.model.family.modality] if gradients else SAMPLES
    return SampleRange(samples, 0, min(len(samples), most))


def _distances(prepared: Prepared, *, gradients: bool) -> Distances:
    """What is known of runs of blocks by statistics, or is measured."""
    if prepared.statistics is not None:
        known = prepared.statistics.index.stream
        assert known is not None
        return Distances(known.cosine, known.divergence)
    live = _live(prepared)
    return measure_distances(
        prepared.model,
        _some(prepared, gradients=gradients),
        device=prepared.device,
        compute_dtype=live.compute_dtype,
        gradients=gradients,
        allocate=live.allocate,
    )


def _live(prepared: Prepared) -> LiveSamples:
    assert prepared.live is not None
    return prepared.live


def _with_distances(gap: GapRecord, distances: Distances | None) -> GapRecord:
    if distances is None:
        return gap
    first, stop = gap.first, gap.first + gap.blocks
    divergence = None if distances.divergence is None else distances.divergence[first][stop]
    return gap.model_copy(update={"distance": distances.cosine[first][stop], "divergence": divergence})


# ---- maps ------------------------------------------------------------------------------------------------------


@dataclass
class _Waiting:
    """A block before a gap, until the stream behind the gap is known.

    Attributes:
        block: its number in the dense model.
        tensors: its own, by on-disk name.
        entering: states that enter it in the model that is made.
    """

    block: int
    tensors: Mapping[str, Tensor]
    entering: Tensor


def _mapped(prepared: Prepared, gaps: Sequence[GapRecord]) -> tuple[list[GapRecord], dict[str, Tensor]]:
    """The gaps with their maps, and what these are absorbed in, by names of the output.

    The dense model's blocks run one after the other. Where a gap begins, the states that enter the block before it wait
    for the dense states behind it; the block with its map then runs on them. So every map sees what those before it
    have changed, and is fitted to the dense model's own stream. Held are a block, and two sets of hidden states, three
    while one waits.
    """
    live, model = _live(prepared), prepared.model
    dense = prepared.plain_view
    stream = dense.stream(live.samples, live.compute_dtype, folds=live.folds, allocate=live.allocate)
    starts = {gap.first: gap for gap in gaps}
    stops = {gap.first + gap.blocks: gap for gap in gaps}
    gone = {block for gap in gaps for block in range(gap.first, gap.first + gap.blocks)}
    numbers = {old: new for new, old in enumerate(block for block in range(model.blocks) if block not in gone)}
    found: list[GapRecord] = []
    maps: dict[str, Tensor] = {}
    waiting: _Waiting | None = None
    ours: Tensor | None = None  # states of the model that is made, once they are not the dense ones
    for block in track(range(max(stops)), "mapping", total=max(stops)):
        tensors = dense.block(block)
        states = stream.states if ours is None else ours
        if block + 1 in starts:
            held = live.allocate(tuple(states.shape), states.dtype)
            held.copy_(states)
            waiting = _Waiting(block, tensors, held)
        elif ours is not None and block not in gone:
            stream.pass_through(stream.factory.build_block(block, tensors), block, ours, ours)
        stream.advance(block, tensors)
        if block + 1 in stops and waiting is not None:
            solved, new = _map_of(prepared, stream, waiting)
            name = _all_of(_consumers(model, numbers[waiting.block]))
            found.append(_with_map(stops[block + 1], solved, name))
            if not solved.identity:
                maps |= {_renamed(model, each, waiting.block, numbers[waiting.block]): t for each, t in new.items()}
            ours = waiting.entering
            if block + 1 < max(stops):
                mapped = stream.factory.build_block(waiting.block, {**waiting.tensors, **new})
                stream.pass_through(mapped, waiting.block, ours, ours)
            waiting = None
    return found, maps


def _map_of(prepared: Prepared, stream: Any, waiting: _Waiting) -> tuple[GapMap, dict[str, Tensor]]:
    """The map of a gap that the stream is behind of, and what it is absorbed in."""
    model, own = prepared.model, depth_of(prepared).compensation
    spaces = find_map_spaces(model.family)
    folds = observe_gap(stream, waiting.block, waiting.tensors, spaces, waiting.entering, stream.states)
    names, bias = _consumers(model, waiting.block), _consumers(model, waiting.block, "bias")[0]
    by_folds = own.lambda_by is not None
    solved = fit_map(
        [each.to(prepared.device) for each in folds],
        biased=bias in waiting.tensors,
        strength=None if by_folds else own.strength,
        grid=own.grid,
    )
    if solved.identity:
        return solved, {}
    new: dict[str, Tensor] = {}
    for name in names:
        new[name], added = absorb_map(solved, waiting.tensors[name].to(prepared.device), waiting.tensors.get(bias))
        new |= {} if added is None else {bias: added}
    cast = {each: tensor.cpu().to(waiting.tensors[each].dtype).contiguous() for each, tensor in new.items()}
    for each, tensor in cast.items():
        if not all_finite(tensor):
            raise UserError(
                f"{each}: the map does not fit its dtype {tensor.dtype}: use more samples or a larger lambda"
            )
    return solved, cast


def _with_map(gap: GapRecord, solved: GapMap, into: str) -> GapRecord:
    figures = {
        "method": solved.method,
        "strength": solved.strength,
        "error_uncompensated": solved.error_uncompensated,
        "error_compensated": solved.error_compensated,
        "error_held_out": solved.error_held_out,
        "into": None if solved.identity else into,
    }
    return gap.model_copy(update=figures)


def _consumers(model: Model, block: int, kind: Kind = "weight") -> list[str]:
    """On-disk names of what a map is absorbed in: of the mlp's last projection, or of every expert's."""
    columns = model.family.columns
    return [model.tensor(block, columns[space].consumer, kind) for space in find_map_spaces(model.family)]


def _all_of(names: Sequence[str]) -> str:
    """One name for what is the same in every expert: `*` in place of its number."""
    if len(names) == 1:
        return names[0]
    first, second = names[:2]
    place = next(at for at, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return f"{first[:place]}*{first[place + 1 :]}"


def _renamed(model: Model, name: str, old: int, new: int) -> str:
    """A tensor's name in the output."""
    prefix = model.family.block
    return prefix.format(block=new) + name.removeprefix(prefix.format(block=old))
