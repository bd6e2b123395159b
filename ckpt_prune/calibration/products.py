"""Products of matrices that are known to be symmetric or triangular, with little more than half the work."""

from collections.abc import Iterator

from torch import Tensor


def strips(n: int) -> Iterator[slice]:
    """Strips of columns, wide enough for full speed and narrow enough to skip nearly half of a triangular product."""
    width = max(256, -(-n // 8))
    return (slice(start, min(start + width, n)) for start in range(0, n, width))


def add_gram(gram: Tensor, x: Tensor, scale: float = 1) -> None:
    """Add `scale` xᵀx of x (m, n) to `gram` (n, n), which is symmetric, in place: one triangle mirrors the other."""
    for strip in strips(x.shape[1]):
        gram[strip, : strip.stop].addmm_(x[:, strip].T, x[:, : strip.stop], alpha=scale)
        gram[: strip.start, strip] = gram[strip, : strip.start].T
