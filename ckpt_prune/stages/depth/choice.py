"""Which blocks go: by how far they move the stream, what they do to the output, or the loss without them."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, GapRecord
from ckpt_prune.measure.samples.samples import SampleRange, Samples
from ckpt_prune.measure.statistics.distances import SAMPLES, Distances, Matrix, measure_distances
from ckpt_prune.measure.statistics.fisher import LIMITS
from ckpt_prune.measure.streams.backward import draw_end_gradients, pass_back, states_at_ends
from ckpt_prune.measure.streams.drift import ResidualBlock
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.depth import check_shortened, output_tensors
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.depth.preview import Wanted, at_depth, depth_record, wanted_depth
from ckpt_prune.stages.depth.runs import least_blocks, least_runs
from ckpt_prune.stages.spaces.effects.measured import label_draws

_REMOVED = "removal"
"""Before the number of a block that the loss chose, in entries of the journal."""
LOSS_TOKENS = 2048
"""Tokens that losses are compared on: every block is run for every other one."""


@torch.no_grad()
def measure_losses_without(
    model: Model,
    samples: Samples,
    gone: Collection[int],
    allowed: Collection[int],
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    part: str = "block",
) -> dict[int, float]:
    """Measure the mean negative log likelihood of a token without the blocks that are gone and one more that may go.

    One walk over the blocks: before one that may go, the states go on as a branch of their own, through all blocks
    that follow. Time: L²/2 runs of a block, and L readouts. Memory: a block, and hidden states of every branch.

    Args:
        allowed: blocks of which each is left out in turn.
        allocate: makes the tensors that hold hidden states.
        part: what is left out of a block: all of it, or its attention or mlp.
    """
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    factory = stream.factory
    branches: dict[int, torch.Tensor] = {}
    for block in track(range(model.blocks), "leaving blocks out", total=model.blocks):
        if block in gone and part == "block":
            continue
        tensors = model.read_block(block)
        outputs = () if part == "block" else output_tensors(model, block, part)
        without_part = tensors | {name: torch.zeros_like(tensors[name]) for name in outputs}
        module = factory.build_block(block, without_part if block in gone else tensors)
        branch = None
        if block in allowed:
            branch = allocate(tuple(stream.states.shape), stream.states.dtype)
            branch.copy_(stream.states)
            if part != "block":
                stream.pass_through(factory.build_block(block, without_part), block, branch, branch)
        for states in (*branches.values(), stream.states):
            stream.pass_through(module, block, states, states)
        if branch is not None:
            branches[block] = branch
    return {block: stream.measure_nll(states) for block, states in branches.items()}


@dataclass(frozen=True)
class PartDistances:
    """How far the part of every block moves stream and output.

    Attributes:
        cosine: mean over tokens of 1 − cos of the stream without the part's output and with it.
        divergence: ½ E[Σ_t (g_t·y_t)²], y being the output of the part's last projection and g the gradients there;
            None if it was not asked for.
    """

    cosine: list[float]
    divergence: list[float] | None = None

    @property
    def distances(self) -> Distances:

        def matrix(values: list[float]) -> Matrix:
            size = len(values) + 1
            return [[values[a] if b == a + 1 else 0.0 for b in range(size)] for a in range(size)]

        return Distances(matrix(self.cosine), None if self.divergence is None else matrix(self.divergence))


def measure_part_distances(
    model: Model,
    samples: Samples,
    part: str,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    gradients: bool,
    allocate: Allocate = allocate_in_memory,
) -> PartDistances:
    """Run the dense model over samples, and back if gradients are asked for, which predict divergences.

    The part is attention or mlp. It has one last projection in each block of the model.
    """
    (space,) = model.family.part_spaces(part)
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    if gradients:
        return _pass_back(model, stream, samples, space, allocate)
    cosine = []
    for block in track(range(model.blocks), "measuring", total=model.blocks):
        tensors = model.read_block(block)
        cosine.append(_measure_cosine(stream, block, tensors, space, stream.states))
        stream.advance(block, tensors)
    return PartDistances(cosine)


def _pass_back(
    model: Model, stream: HiddenStream, samples: Samples, space: SpaceName, allocate: Allocate
) -> PartDistances:
    states = states_at_ends(model, stream, allocate)
    factory, consumer = stream.factory, model.family.consumers[space].consumer
    drawn = draw_end_gradients(stream.readout(), samples, states.pop(), allocate)
    cosine, divergence = [0.0] * model.blocks, [0.0] * model.blocks
    for block in track(range(model.blocks - 1, -1, -1), "gradients", total=model.blocks):
        tensors, entering = model.read_block(block), states.pop()
        cosine[block] = _measure_cosine(stream, block, tensors, space, entering)
        path = factory.module_path(block, consumer)
        module = factory.build_block(block, tensors).requires_grad_(False)
        for batch in pass_back(stream, module, block, entering, [draw.values for draw in drawn], [path]):
            draw = drawn[batch.index]
            shift = (batch.gradients[path].float() * batch.outputs[path].float()).sum(-1).double()
            # Over all tokens of a sample if it has one prediction, else token by token.
            shift = shift.view(batch.samples, -1).sum(1) if draw.whole else shift
            divergence[block] += draw.weight * float(shift.square().sum()) / 2 / len(samples)
    return PartDistances(cosine, divergence)


@torch.no_grad()
def _measure_cosine(
    stream: HiddenStream, block: int, tensors: dict[str, Tensor], space: SpaceName, entering: Tensor
) -> float:
    """Return the mean of 1 − cos of the stream without a part and with it, before any norm of their sum."""
    residual, distance, tokens = ResidualBlock(stream, block, tensors, [space]), 0.0, 0
    residual.whole = True
    for _, rows in stream.batches:
        residual.run(rows, entering[rows])
        after = residual.after(space)
        before = after - residual.addition(space)
        distance += float((1 - functional.cosine_similarity(before, after, dim=-1)).sum())
        tokens += len(after)
    return max(0.0, distance / tokens)


def choose_depth(prepared: Prepared, journal: Journal | None = None) -> DepthRecord:
    """Choose the blocks that go, and return them with the distances of the gaps; no map is fitted.

    Args:
        prepared: of a recipe that drops blocks.
        journal: of the run, where blocks that were chosen one by one are entered.
    """
    if prepared.plan is not None:
        assert prepared.plan.depth is not None
        return prepared.plan.depth
    gone, distances = _choose_blocks(prepared, journal)
    record = depth_record(prepared, gone)
    if record.part == "block":
        check_shortened(prepared.model, record.kept)
    return record.model_copy(update={"gaps": [_with_distances(gap, distances) for gap in record.gaps]})


def drop_planned_blocks(prepared: Prepared) -> Prepared:
    """Return the state without the blocks that the recipe drops, for a plan: no map is fitted."""
    return at_depth(prepared, choose_depth(prepared)) if prepared.recipe.has("depth") else prepared


def _choose_blocks(prepared: Prepared, journal: Journal | None) -> tuple[list[int], Distances | None]:
    """Return the blocks that go, ascending, and the distances of all runs that they were chosen by."""
    depth, wanted = prepared.stage(Depth), wanted_depth(prepared)
    if depth.choice is None or not wanted.count:
        return list(wanted.allowed[: wanted.count]), None
    if depth.choice == "loss":
        return _choose_by_loss(prepared, wanted, journal), None
    if depth.part != "block":
        return _choose_parts(prepared, wanted)
    distances = _read_distances(prepared, gradients=depth.choice == "divergence")
    if depth.choice == "influence":
        costs = [distances.cosine[block][block + 1] for block in range(prepared.model.blocks)]
        return least_blocks(costs, wanted.count, wanted.allowed), distances
    matrix = distances.divergence if depth.choice == "divergence" else distances.cosine
    assert matrix is not None
    runs = least_runs(matrix, wanted.count, depth.most_runs, wanted.allowed)
    if runs is None:
        raise UserError(
            f"recipe {prepared.recipe.name} has no {wanted.count} blocks to drop in {depth.most_runs} run(s): say more "
            "depth.runs, or drop fewer"
        )
    return runs, distances


def _choose_by_loss(prepared: Prepared, wanted: Wanted, journal: Journal | None) -> list[int]:
    """Choose blocks one after the other, each the one without which the loss is least; of equal ones the first."""
    live = prepared.live_samples
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
            part=prepared.stage(Depth).part,
        )
        gone.append(min(losses, key=lambda block: (losses[block], block)))
        if journal is not None:
            with disk_failures(journal.folder):
                journal.record(f"{_REMOVED} {len(gone)}", note=gone[-1])
    return sorted(gone)


def _choose_parts(prepared: Prepared, wanted: Wanted) -> tuple[list[int], Distances]:
    """Choose the blocks whose part does least, each by itself."""
    live, depth = prepared.live_samples, prepared.stage(Depth)
    gradients = depth.choice == "divergence"
    measured = measure_part_distances(
        prepared.model,
        _compared_samples(prepared, gradients=gradients),
        depth.part,
        device=prepared.device,
        compute_dtype=live.compute_dtype,
        gradients=gradients,
        allocate=live.allocate,
    )
    costs = measured.cosine if measured.divergence is None else measured.divergence
    return least_blocks(costs, wanted.count, wanted.allowed), measured.distances


def _compared_samples(prepared: Prepared, *, gradients: bool) -> SampleRange:
    samples = prepared.live_samples.samples
    most = LIMITS[prepared.model.family.modality] if gradients else SAMPLES
    return SampleRange(samples, 0, min(len(samples), most))


def _read_distances(prepared: Prepared, *, gradients: bool) -> Distances:
    """Return the distances of runs of blocks: from statistics, or measured now."""
    if prepared.statistics is not None:
        stream = prepared.statistics.index.stream
        assert stream is not None
        return Distances(stream.cosine, stream.divergence)
    live = prepared.live_samples
    return measure_distances(
        prepared.model,
        _compared_samples(prepared, gradients=gradients),
        device=prepared.device,
        compute_dtype=live.compute_dtype,
        gradients=gradients,
        draws=label_draws(prepared.model),
        allocate=live.allocate,
    )


def _with_distances(gap: GapRecord, distances: Distances | None) -> GapRecord:
    if distances is None:
        return gap
    first, stop = gap.first, gap.first + gap.blocks
    divergence = None if distances.divergence is None else distances.divergence[first][stop]
    return gap.model_copy(update={"distance": distances.cosine[first][stop], "divergence": divergence})
