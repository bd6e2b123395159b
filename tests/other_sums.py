"""Products whose sums are in another order for every number of rows and columns, as on some processors.

A library may add up in one order for 22 columns and in another for 17, for a lone row, or on another processor. What
holds only where it does not is no promise. `pytest --other-sums` runs everything in this process with such products.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    ATEN.mm.default: lambda a, b: _multiply(a, b),
    ATEN.bmm.default: lambda a, b: _multiply(a, b),
    ATEN.addmm.default: lambda c, a, b, beta=1, alpha=1: beta * c + alpha * _multiply(a, b),
    ATEN.baddbmm.default: lambda c, a, b, beta=1, alpha=1: beta * c + alpha * _multiply(a, b),
}


WIDE = {torch.float32, torch.float64}
"""In bfloat16 a library rounds once, whatever the order."""


class OtherSums(TorchDispatchMode):
    """While it is on, products of float32 and float64 on the CPU are sums of two products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
        if func in PRODUCTS and all(type(leaf) is Tensor and leaf.dtype in WIDE and leaf.is_cpu for leaf in tensors):
            return PRODUCTS[func](*args, **kwargs)
        return func(*args, **kwargs)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, (…, m, k) @ (…, k, n), where the k terms are split at a place that m and n choose."""
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    rows, inner, columns = *a.shape[-2:], b.shape[-1]
    first = (rows + columns) % max(inner, 1)
    if not first:
        return multiply(a, b)
    return multiply(a[..., :first], b[..., :first, :]) + multiply(a[..., first:], b[..., first:, :])
