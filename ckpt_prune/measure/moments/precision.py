"""Find the sums of products for which float32 is too coarse: those of large means, and of massive tokens.

A Gram in float32 rounds at 6e-8 of the sums that it holds. If means are r times the deviations, or one token is r
times as long as the others, then the others vary by 1 / r² of that, which is lost. Such sums are taken in float64
(measure/README.md, section 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

OFFSET = 32.0
"""|mean| / deviation of an input above which float32 is too coarse."""
MASSIVE = 100.0
"""Length of a token, as a multiple of the median token's, above which it is too coarse."""
PAIRS = 128.0
"""Product of the offsets of queries and keys above which it is: logits multiply the Grams of both."""
LEAST = 8
"""Deviations of fewer tokens are small by chance."""
CONSTANT = 1e-13
"""Share of its energy below which an input's variance is rounding: the input is constant."""


@dataclass(frozen=True)
class Extent:
    """How far vectors reach beyond what they vary by.

    Attributes:
        count: vectors that the offset is measured on.
        offset: the largest |mean| / deviation of those entries that vary.
        lengths: of the vectors of one batch, (N,).
    """

    count: int
    offset: float
    lengths: Tensor

    @classmethod
    def measure(cls, vectors: Tensor, count: int, total: Tensor, square: Tensor) -> "Extent":
        """Measure a batch (N, d), from Σ x and Σ x² of it, or of `count` vectors up to it, (d,) float64 each."""
        energy, mean_square = square / max(1, count), (total / max(1, count)).square()
        variance = energy - mean_square
        ratio = torch.where(variance > CONSTANT * energy, mean_square / variance, 0.0)
        offset = float(ratio.amax().sqrt()) if ratio.numel() else 0.0
        wide = torch.promote_types(vectors.dtype, torch.float32)
        return cls(count, offset, torch.linalg.vector_norm(vectors, dim=1, dtype=wide))


def needs_double(left: Extent, right: Extent, offsets: float = OFFSET**2) -> bool:
    """Return True if float32 is too coarse for Σ x yᵀ over pairs of vectors.

    `left` is the extent of x and `right` that of y. `offsets` is the product of both offsets above which it is.
    """
    if left.count < LEAST or not len(left.lengths):
        return False
    if left.offset * right.offset > offsets:
        return True
    usual = left.lengths.median() * right.lengths.median()
    return bool((left.lengths * right.lengths).amax() > MASSIVE**2 * usual) and bool(usual > 0)
