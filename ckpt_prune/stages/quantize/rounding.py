"""Rounding weights to whole numbers: pure functions of a weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ckpt_prune.stages.quantize.scheme import PackingScheme

SHRINKS = tuple(1 - step / 20 for step in range(8))
"""Shares of the largest weight of a group that its range may end at: what is beyond is cut off, the others gain."""


def scales_of(weight: Tensor, scheme: PackingScheme, dtype: torch.dtype, shrinks: Sequence[float] = SHRINKS) -> Tensor:
    """The scales under which rounding to nearest changes a weight least, in the type that they are stored in.

    Args:
        weight: (rows, columns).
        scheme: how it is stored.
        dtype: of the scales.
        shrinks: what is tried for each group, in this order; of equals the first is taken.

    Returns:
        (rows, groups): of every group, that with the least sum of squared differences.
    """
    groups = _grouped(weight, scheme)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    half = (2**scheme.bits - 1) / 2
    best = least = None
    for shrink in shrinks:
        scale = (largest * shrink / half).to(dtype)
        # A group of zeros, or one whose scale its type rounds to zero.
        scale = torch.where(scale == 0, torch.finfo(dtype).tiny, scale)
        change = (_rounded(groups, scale, scheme) * scale.to(groups.dtype) - groups).square().sum(dim=-1, keepdim=True)
        if best is None or least is None:
            best, least = scale, change
        else:
            better = change < least
            best, least = torch.where(better, scale, best), torch.where(better, change, least)
    assert best is not None
    return best.squeeze(-1)


def codes_of(weight: Tensor, scales: Tensor, scheme: PackingScheme) -> Tensor:
    """The whole numbers nearest to weight / scale that there are, (rows, columns) int8."""
    groups = _grouped(weight, scheme)
    return _rounded(groups, scales.unsqueeze(-1), scheme).reshape(weight.shape).to(torch.int8)


def weights_of(codes: Tensor, scales: Tensor, scheme: PackingScheme) -> Tensor:
    """What codes and scales stand for, in float64."""
    return (_grouped(codes.double(), scheme) * scales.double().unsqueeze(-1)).reshape(codes.shape)


def _grouped(weight: Tensor, scheme: PackingScheme) -> Tensor:
    """(rows, groups, columns of a group), of at least float32."""
    exact = weight if weight.dtype == torch.float64 else weight.float()
    return exact.reshape(len(weight), scheme.scales(weight.shape[1]), -1)


def _rounded(groups: Tensor, scale: Tensor, scheme: PackingScheme) -> Tensor:
    most = 2 ** (scheme.bits - 1)
    return (groups / scale.to(groups.dtype)).round().clamp(-most, most - 1)
