"""Products of matrices that are known to be symmetric or triangular, with little more than half the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def strips(n: int) -> Iterator[slice]:
    """Strips of columns, wide enough for full speed and narrow enough to skip nearly half of a triangular product."""
    width = max(256, -(-n // 8))
    return (slice(start, min(start + width, n)) for start in range(0, n, width))


def add_gram(gram: Tensor, x: Tensor, scale: float = 1) -> None:
    """Add `scale` xᵀx of x (m, n) to `gram` (n, n), which is symmetric, in place: one triangle mirrors the other.

    Tokens in bfloat16 are multiplied as such and added up in float32: no product is rounded, and on processors that
    multiply in bfloat16 it takes half the time or less.
    """
    with _narrow_products(x):
        x = x.to(gram.dtype)
        for strip in strips(x.shape[1]):
            gram[strip, : strip.stop].addmm_(x[:, strip].T, x[:, : strip.stop], alpha=scale)
            gram[: strip.start, strip] = gram[strip, : strip.start].T


def gram_flops(rows: int, width: int) -> int:
    """What `add_gram` multiplies and adds of x (rows, width)."""
    return sum(2 * rows * (strip.stop - strip.start) * strip.stop for strip in strips(width))


def products_on(device: torch.device) -> Any:
    """PyTorch's settings of matrix products on a device: `fp32_precision` is what factors in float32 are rounded to."""
    return (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul


@contextmanager
def _narrow_products(x: Tensor) -> Iterator[None]:
    """Float32 products that round their factors to what x is in, where it is bfloat16. Every sum stays in float32."""
    if x.dtype != torch.bfloat16:
        yield
        return
    products = products_on(x.device)
    before = products.fp32_precision
    # An accelerator's TF32 holds every number of bfloat16, too.
    products.fp32_precision = "tf32" if x.device.type == "cuda" else "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before
