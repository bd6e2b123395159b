"""Maps that make up for blocks that go: what they are fitted to, and what absorbs them (compensation, section 12)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.compensation.gap import GapMap, absorb_map, fit_map
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, GapRecord
from ckpt_prune.measure.moments.inputs import Drift, Moments
from ckpt_prune.measure.streams.drift import ResidualBlock
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.depth import output_tensors
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Kind, SpaceName
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.depth.preview import find_map_spaces, without


@dataclass
class _Waiting:
    """A block before a gap, until the stream behind the gap is known.

    Attributes:
        block: its number in the dense model.
        entering: states that enter it in the model that is made.
    """

    block: int
    tensors: Mapping[str, Tensor]
    entering: Tensor


def compensate(prepared: Prepared, record: DepthRecord, file: Path) -> DepthRecord:
    """Fit maps for the blocks that go, write the tensors that change to a file, and return the record."""
    depth, gaps = prepared.stage(Depth), record.gaps
    maps: dict[str, Tensor] = {}
    if depth.part != "block":
        maps = {} if record.left_out else _zeros(prepared.model, record)
    elif depth.compensation.linear and gaps:
        gaps, maps = fit_maps(prepared, gaps)
    with disk_failures(file.parent):
        if maps:
            save_file(maps, file)
            sync(file)
    return record.model_copy(update={"gaps": gaps})


def remaining_model(model: Model, record: DepthRecord, file: Path) -> Model:
    """Return the model without the blocks that go. If the file exists, its tensors replace the model's."""
    remaining = without(model, record)
    if not file.is_file():
        return remaining
    maps = {name: replace(info, file=str(file)) for name, info in read_header(file).tensors.items()}
    return replace(remaining, checkpoint=replace(remaining.checkpoint, replaced=maps))


def _zeros(model: Model, record: DepthRecord) -> dict[str, Tensor]:
    """Return zeros for the last projections of the parts that are gone."""
    names = [name for gap in record.gaps for name in output_tensors(model, gap.first, record.part)]
    infos = model.checkpoint.tensors
    return {name: torch.zeros(infos[name].shape, dtype=infos[name].dtype) for name in names}


def fit_maps(prepared: Prepared, gaps: Sequence[GapRecord]) -> tuple[list[GapRecord], dict[str, Tensor]]:
    """Fit the maps of all gaps. Return the gaps with their figures, and the changed tensors by their output names.

    The dense model's blocks run one after the other. Where a gap begins, the states that enter the block before it wait
    for the dense states behind it; the block with its map then runs on them. So every map sees what those before it
    have changed, and is fitted to the dense model's own stream. In memory are a block, and two sets of hidden states,
    three while one waits.
    """
    live, model = prepared.live_samples, prepared.model
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
            kept_states = live.allocate(tuple(states.shape), states.dtype)
            kept_states.copy_(states)
            waiting = _Waiting(block, tensors, kept_states)
        elif ours is not None and block not in gone:
            stream.pass_through(stream.factory.build_block(block, tensors), block, ours, ours)
        stream.advance(block, tensors)
        if block + 1 in stops and waiting is not None:
            solved, new = _fit_map(prepared, stream, waiting)
            name = _join_names(_consumers(model, numbers[waiting.block]))
            found.append(_record_map(stops[block + 1], solved, name))
            if not solved.identity:
                maps |= {
                    _rename_tensor(model, each, waiting.block, numbers[waiting.block]): t for each, t in new.items()
                }
            ours = waiting.entering
            if block + 1 < max(stops):
                mapped = stream.factory.build_block(waiting.block, {**waiting.tensors, **new})
                stream.pass_through(mapped, waiting.block, ours, ours)
            waiting = None
    return found, maps


def _fit_map(prepared: Prepared, stream: Any, waiting: _Waiting) -> tuple[GapMap, dict[str, Tensor]]:
    """Fit the map of the gap that the stream has just passed; return it and the tensors that absorb it."""
    model, settings = prepared.model, prepared.stage(Depth).compensation
    spaces = find_map_spaces(model.family)
    folds = observe_gap(stream, waiting.block, waiting.tensors, spaces, waiting.entering, stream.states)
    names, bias = _consumers(model, waiting.block), _consumers(model, waiting.block, "bias")[0]
    by_folds = settings.lambda_by is not None
    solved = fit_map(
        [each.to(prepared.device) for each in folds],
        biased=bias in waiting.tensors,
        strength=None if by_folds else settings.strength,
        grid=settings.grid,
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


def _record_map(gap: GapRecord, solved: GapMap, into: str) -> GapRecord:
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
    """Return the on-disk names of the tensors that absorb a map: the mlp's last projection, or every expert's."""
    columns = model.family.columns
    return [model.tensor(block, columns[space].consumer, kind) for space in find_map_spaces(model.family)]


def _join_names(names: Sequence[str]) -> str:
    """Return one name for the same tensor of all experts: `*` replaces the number."""
    if len(names) == 1:
        return names[0]
    first, second = names[:2]
    place = next(at for at, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return f"{first[:place]}*{first[place + 1 :]}"


def _rename_tensor(model: Model, name: str, old: int, new: int) -> str:
    prefix = model.family.block
    return prefix.format(block=new) + name.removeprefix(prefix.format(block=old))


@torch.no_grad()
def observe_gap(
    stream: HiddenStream,
    index: int,
    tensors: Mapping[str, Tensor],
    spaces: Sequence[SpaceName],
    entering: Tensor,
    reached: Tensor,
) -> tuple[Moments, ...]:
    """Measure moments of z = W x of a block's mlp without its bias, with the drift δ = y − z, a tuple over folds.

    With experts z is their sum. y is what W x would have to be for the block to give `reached`. If the mlp's output is
    added to the stream as it is, δ = `reached` − (the block's output). A scale, a multiplier or a norm on the way is
    divided out, token by token, as for the drift of a site (`streams.drift`), and so is a norm that the whole sum
    passes.

    Args:
        stream: of the dense model, for its batches and what blocks are passed beside states; its own are not read.
        entering: states that enter it, (N, T, hidden).
        reached: states that it is to give.
    """
    family, factory = stream.factory.family, stream.factory
    space, *_ = spaces
    consumer = family.columns[space].consumer
    residual = ResidualBlock(stream, index, tensors, spaces)
    residual.whole = True
    norms = _NormWatcher(residual.block)
    width = factory.count_outputs(residual.block, index, consumer)
    moments = [Moments.zeros(width, gram=True, device=factory.device) for _ in range(stream.folds)]
    drifts = [Drift.zeros(width, width, factory.device) for _ in range(stream.folds)]
    for fold, rows in stream.batches:
        residual.run(rows, entering[rows])
        lacking = reached[rows].to(factory.device).double() - residual.left.double()
        output = _mlp_output(stream, index, residual, spaces, lacking.flatten(0, -2))
        delta = residual.unscale(space, norms.undo(residual.left, lacking).flatten(0, -2))
        counted = stream.counted(rows)
        if counted is not None:
            output, delta = output[counted.flatten()], delta[counted.flatten()]
        moments[fold] = moments[fold].accumulate(output)
        drifts[fold] = drifts[fold].accumulate(delta, output)
    pairs = zip(moments, drifts, strict=True)
    return tuple(replace(fold.to("cpu"), drift=drift.to("cpu")) for fold, drift in pairs)


def _mlp_output(
    stream: HiddenStream, index: int, residual: ResidualBlock, spaces: Sequence[SpaceName], like: Tensor
) -> Tensor:
    """Return the output of a block's mlp without its bias, (tokens, hidden) float64; of experts their sum."""
    columns, experts = stream.factory.family.columns, stream.factory.find_experts(residual.block)
    if experts is None:
        consumer = columns[spaces[0]].consumer
        module: Any = residual.block.get_submodule(stream.factory.module_path(index, consumer))
        output = residual.outputs[consumer].flatten(0, -2).double()
        return output if module.bias is None else output - module.bias.double()
    total = torch.zeros_like(like)
    for space in spaces:
        number = stream.factory.find_expert(space)
        tokens = None if number is None else experts.routed.get(number)
        if tokens is not None:  # the output of another expert is left from an earlier batch
            total.index_add_(0, tokens, residual.outputs[columns[space].consumer].double())
    return total


class _NormWatcher:
    """Watches the norms of a block, on which hooks are left, for one that its output has passed as a whole."""

    def __init__(self, block: nn.Module) -> None:
        self._last: tuple[nn.LayerNorm, Tensor, Tensor] | None = None
        for module in block.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(self._see)

    def _see(self, module: nn.LayerNorm, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._last = module, args[0], output

    def undo(self, left: Tensor, lacking: Tensor) -> Tensor:
        """Return how much the sum before the norm would have to change for the block's output to change by `lacking`.

        The norm forgets the mean and the length of the sum: it keeps both.
        """
        if self._last is None or self._last[2].shape != left.shape or not torch.equal(self._last[2], left):
            return lacking
        module, entered, _ = self._last
        wide = entered.double()
        length = (wide.var(-1, unbiased=False, keepdim=True) + module.eps).sqrt()
        gain = torch.ones_like(wide[..., :1]) if module.weight is None else module.weight.double()
        return torch.where(gain == 0, 0.0, length * lacking / gain)
