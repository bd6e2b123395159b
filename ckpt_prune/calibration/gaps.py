"""Moments of what the mlp before a gap gives, and of what it would have to give for the stream behind the gap.

See compensation/README.md, section 12.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.family import Family
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.calibration.drift import Residual
from ckpt_prune.calibration.moments import Drift, Moments
from ckpt_prune.calibration.streams import HiddenStream


def map_space(family: Family) -> SpaceName | None:
    """The space in whose consumer a map can be absorbed: a block's mlp; None where several give that together."""
    own = family.part_spaces("mlp")
    plain = [name for name, space in own.items() if not space.experts and space.gate is None]
    return plain[0] if len(own) == len(plain) == 1 else None


@torch.no_grad()
def observe_gap(
    stream: HiddenStream,
    index: int,
    tensors: Mapping[str, Tensor],
    space: SpaceName,
    entering: Tensor,
    reached: Tensor,
) -> tuple[Moments, ...]:
    """Moments of z = W x of a block's mlp without its bias, with the drift δ = y − z, a tuple over folds.

    y is what W x would have to be for the block to give `reached`. Where what the mlp gives is added to the stream as
    it is, δ = `reached` − (what the block gives). A scale, a multiplier or a norm on the way is divided out, token by
    token, as for the drift of a site (`calibration.drift`), and so is a norm that the whole sum passes.

    Args:
        stream: of the dense model, for its batches and what blocks are passed beside states; its own are not read.
        index: of the block.
        tensors: its on-disk tensors.
        space: `map_space`.
        entering: states that enter it, (N, T, hidden).
        reached: states that it is to give.
    """
    family, factory = stream.factory.family, stream.factory
    consumer = family.columns[space].consumer
    residual = Residual(stream, index, tensors, [space])
    residual.whole = True
    norms = _Norms(residual.block)
    module: Any = residual.block.get_submodule(factory.module_path(index, consumer))
    width = factory.outputs(residual.block, index, consumer)
    moments = [Moments.zeros(width, gram=True, device=factory.device) for _ in range(stream.folds)]
    drifts = [Drift.zeros(width, width, factory.device) for _ in range(stream.folds)]
    for fold, rows in stream.batches:
        residual.run(rows, entering[rows])
        given = residual.outputs[consumer].flatten(0, -2).double()
        given = given if module.bias is None else given - module.bias.double()
        lacking = reached[rows].to(factory.device).double() - residual.left.double()
        delta = residual.unscaled(space, norms.undone(residual.left, lacking).flatten(0, -2))
        moments[fold] = moments[fold].accumulate(given)
        drifts[fold] = drifts[fold].accumulate(delta, given)
    pairs = zip(moments, drifts, strict=True)
    return tuple(replace(own.to("cpu"), drift=drift.to("cpu")) for own, drift in pairs)


class _Norms:
    """Watches the norms of a block for one that its output has passed as a whole.

    Args:
        block: hooks are left on it.
    """

    def __init__(self, block: nn.Module) -> None:
        self._last: tuple[nn.LayerNorm, Tensor, Tensor] | None = None
        for module in block.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(self._see)

    def _see(self, module: nn.LayerNorm, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._last = module, args[0], output

    def undone(self, left: Tensor, lacking: Tensor) -> Tensor:
        """By how much the sum before the norm would have to differ for the block's output to differ by `lacking`.

        The norm forgets the mean and the length of the sum: it keeps both.
        """
        if self._last is None or self._last[2].shape != left.shape or not torch.equal(self._last[2], left):
            return lacking
        module, entered, _ = self._last
        wide = entered.double()
        length = (wide.var(-1, unbiased=False, keepdim=True) + module.eps).sqrt()
        gain = torch.ones_like(wide[..., :1]) if module.weight is None else module.weight.double()
        return torch.where(gain == 0, 0.0, length * lacking / gain)
