"""Moments of the mlp's output before a gap, and of the output that would make up for the gap.

See compensation/README.md, section 12.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.measure.moments.inputs import Drift, Moments
from ckpt_prune.measure.streams.drift import Residual
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.family import Family
from ckpt_prune.model.spaces import SpaceName


def find_map_spaces(family: Family) -> list[SpaceName]:
    """Return the spaces in whose consumers a map can be absorbed: a block's mlp, or those of all its experts.

    Experts' outputs are added up, each token's with the router's weights, so that T Σ g_e W_e x = Σ g_e (T W_e) x.
    There are none if something else adds to the sum, or stands behind it: experts that all tokens share, with a factor.
    """
    spaces = family.part_spaces("mlp")
    routed = all(space.experts and space.gate is None and space.norm is None for space in spaces.values())
    plain = [space.gate for space in spaces.values()] == [None]
    return list(spaces) if routed or plain else []


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

    Of experts z is the sum. y is what W x would have to be for the block to give `reached`. If the mlp's output is
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
    residual = Residual(stream, index, tensors, spaces)
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
        moments[fold] = moments[fold].accumulate(output)
        drifts[fold] = drifts[fold].accumulate(delta, output)
    pairs = zip(moments, drifts, strict=True)
    return tuple(replace(own.to("cpu"), drift=drift.to("cpu")) for own, drift in pairs)


def _mlp_output(
    stream: HiddenStream, index: int, residual: Residual, spaces: Sequence[SpaceName], like: Tensor
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
