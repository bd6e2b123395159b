"""Products of symmetric or triangular matrices, with little more than half the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.parallel.devices import multiplies_bfloat16


def cut_strips(n: int) -> Iterator[slice]:
    """Cut n columns into strips, wide enough for full speed and narrow enough to skip nearly half of the products."""
    width = max(256, -(-n // 8))
    return (slice(start, min(start + width, n)) for start in range(0, n, width))


def add_gram(gram: Tensor, x: Tensor, scale: float = 1) -> None:
    """Add `scale` xᵀx of x (m, n) to the symmetric `gram` (n, n) in place. One triangle mirrors the other.

    Tokens in bfloat16 are multiplied as such, if the device is faster so, and added up in float32: no product is
    rounded, and it takes half the time or less.
    """
    with multiply_narrowly(x):
        x = x.to(gram.dtype)
        for strip in cut_strips(x.shape[1]):
            gram[strip, : strip.stop].addmm_(x[:, strip].T, x[:, : strip.stop], alpha=scale)
            gram[: strip.start, strip] = gram[strip, : strip.start].T


def product_settings(device: torch.device) -> Any:
    """Return torch's settings of matrix products: `fp32_precision` is what factors in float32 are rounded to."""
    return (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul


@contextmanager
def multiply_narrowly(x: Tensor) -> Iterator[None]:
    """Let float32 products round their factors to bfloat16 if x is in it and that is faster. Sums stay in float32."""
    if x.dtype != torch.bfloat16 or not multiplies_bfloat16(x.device):
        yield
        return
    settings = product_settings(x.device)
    before = settings.fp32_precision
    # An accelerator's TF32 holds every number of bfloat16, too.
    settings.fp32_precision = "tf32" if x.device.type == "cuda" else "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
