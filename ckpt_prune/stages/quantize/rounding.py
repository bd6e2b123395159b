"""Round weights to whole numbers, to nearest or by GPTQ: pure functions of a weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ckpt_prune.sparsity.inverse import OrderedFactor
from ckpt_prune.sparsity.visiting import fix_in_turn, visit_inputs
from ckpt_prune.stages.quantize.scheme import PackingScheme

_BLOCK = 128
"""Columns that are updated at once by those before them."""


def gptq_codes(weight: Tensor, gram: OrderedFactor, scales: Tensor, scheme: PackingScheme) -> Tensor:
    """Round a weight under given scales so that its outputs change least: (rows, columns) int8; zeros stay zeros.

    GPTQ (Frantar et al. 2022, Algorithm 1) on the columns in the order of `gram`; groups stay where they are.
    Memory beyond the arguments: three float64 matrices of the weight's size.

    Args:
        weight: (rows, columns).
        gram: factor of the Gram of the weight's inputs.
        scales: of every group, as `scales_of` gives them, (rows, groups).
    """
    order = gram.order
    old = weight.T[order].to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    steps, size = scales.T.double(), weight.shape[1] // scales.shape[1]
    groups = (order // size).tolist()
    codes = torch.zeros(old.shape, dtype=torch.int8, device=weight.device)
    row = PackingScheme(scheme.format, None)

    def visit(W: Tensor, U: Tensor, here: slice) -> None:
        def nearest(j: int, weights: Tensor) -> Tensor:
            at = here.start + j
            step = steps[groups[at]]
            codes[at] = codes_of(weights[:, None], step[:, None], row)[:, 0].masked_fill(old[at] == 0, 0)
            return codes[at] * step

        fix_in_turn(W, U, nearest)

    visit_inputs(old, gram.factor, _BLOCK, visit)
    return torch.empty_like(codes).index_copy_(0, order, codes).T.contiguous()


SHRINKS = tuple(1 - step / 20 for step in range(8))
"""Shares of the largest weight of a group that its range may end at: what is beyond is cut off, the others gain."""
MORE_SHRINKS = tuple(1 - step / 20 for step in range(13))
"""The same if inputs differ in energy: large weights of inputs that hardly count may be cut off further."""


def scales_of(
    weight: Tensor,
    scheme: PackingScheme,
    dtype: torch.dtype,
    shrinks: Sequence[float] = SHRINKS,
    energies: Tensor | None = None,
) -> Tensor:
    """Return the scales under which rounding to nearest changes a weight least, (rows, groups) in `dtype`.

    Every group of a weight (rows, columns) gets the scale with the least sum of squared differences. If the energies of
    the inputs, (columns,), are given, each square is multiplied by that of its input: the sum is then the outputs'
    change if inputs did not depend on one another. Then scales that put the largest weight at the least code are tried
    too, as in GGUF's q4_0; they are negative where that weight is positive. Among equals the first wins.
    """
    groups = _group(weight, scheme)
    counts = 1.0 if energies is None else _group(energies[None], scheme).to(groups.dtype)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    half = (2**scheme.bits - 1) / 2
    tried = [largest * shrink / half for shrink in shrinks]
    if energies is not None:
        extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
        tried += [extreme * shrink / -(2 ** (scheme.bits - 1)) for shrink in shrinks]
    best = least = None
    for candidate in tried:
        scale = candidate.to(dtype)
        # A group of zeros, or one whose scale its type rounds to zero.
        scale = torch.where(scale == 0, torch.finfo(dtype).tiny, scale)
        change = (_round(groups, scale, scheme) * scale.to(groups.dtype) - groups).square().mul_(counts)
        lost = change.sum(dim=-1, keepdim=True)
        if best is None or least is None:
            best, least = scale, lost
        else:
            better = lost < least
            best, least = torch.where(better, scale, best), torch.where(better, lost, least)
    assert best is not None
    return best.squeeze(-1)


def codes_of(weight: Tensor, scales: Tensor, scheme: PackingScheme) -> Tensor:
    """Return the whole numbers nearest to weight / scale, within range, (rows, columns) int8."""
    groups = _group(weight, scheme)
    return _round(groups, scales.unsqueeze(-1), scheme).reshape(weight.shape).to(torch.int8)


def weights_of(codes: Tensor, scales: Tensor, scheme: PackingScheme) -> Tensor:
    """Return the weights that codes and scales stand for, in float64."""
    return (_group(codes.double(), scheme) * scales.double().unsqueeze(-1)).reshape(codes.shape)


def _group(weight: Tensor, scheme: PackingScheme) -> Tensor:
    """Return (rows, groups, columns of a group), of at least float32."""
    exact = weight if weight.dtype == torch.float64 else weight.float()
    return exact.reshape(len(weight), scheme.scales(weight.shape[1]), -1)


def _round(groups: Tensor, scale: Tensor, scheme: PackingScheme) -> Tensor:
    most = 2 ** (scheme.bits - 1)
    return (groups / scale.to(groups.dtype)).round().clamp(-most, most - 1)
