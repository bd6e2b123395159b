"""Sums in a fixed order."""

from collections.abc import Iterable

import torch
from torch import Tensor


def in_order(parts: Iterable[Tensor]) -> Tensor:
    """Σ of tensors of one shape and dtype, from the first to the last, in float64 and rounded once.

    However the parts were come by, the same parts in the same order give the same bytes; and other ways to cut the same
    terms into parts change no more than rounding in float64 does, which float32 sums hardly see.

    Args:
        parts: at least one.
    """
    rest = iter(parts)
    first = next(rest)
    wide = torch.promote_types(first.dtype, torch.float64) if first.is_floating_point() else first.dtype
    total = first.to(wide, copy=True)
    for part in rest:
        total += part
    return total.to(first.dtype)
