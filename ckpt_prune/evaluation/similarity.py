"""How alike two models' hidden states are, token by token and as wholes, from sums."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Similarity:
    """How alike hidden states of the same N tokens are, a of a reference and b of another model.

    Attributes:
        mse: Σ ‖b − a‖² / (N d), d hidden dimensions.
        relative_error: Σ ‖b − a‖² / Σ ‖a‖²; None if a is zero.
        cosine: mean over tokens of a·b / (‖a‖ ‖b‖); that of two zeros is 1, of one 0.
        cka: linear centred kernel alignment (Kornblith et al. 2019), which no rotation or scale of either
            changes: ‖BᵀA‖² / (‖AᵀA‖ ‖BᵀB‖) of the centred states; None if either is the same for all tokens.
    """

    mse: float
    relative_error: float | None
    cosine: float
    cka: float | None


class SimilaritySums:
    """Adds up what `Similarity` is made from, in float64. Memory: three (d, d) matrices; work 6 d² flops a token."""

    def __init__(self) -> None:
        self._tokens = 0
        self._error = self._energy = self._cosine = 0.0
        self._shifts: tuple[Tensor, Tensor] | None = None
        self._sums: list[Tensor] = []
        self._products: list[Tensor] = []

    def add(self, reference: Tensor, other: Tensor) -> None:
        """Add hidden states of tokens: a and b, (..., d), of any floating dtype, on one device."""
        a, b = (each.reshape(-1, each.shape[-1]).double() for each in (reference, other))
        dot, norms = (a * b).sum(1), [each.square().sum(1) for each in (a, b)]
        both = (norms[0] * norms[1]).sqrt()
        cosines = torch.where(both > 0, dot / both, (norms[0] == norms[1]).double())
        self._tokens += len(a)
        self._error += float((b - a).square().sum())
        self._energy += float(norms[0].sum())
        self._cosine += float(cosines.sum())
        if self._shifts is None:
            # Some dimensions have means far larger than their spread: products in float32 would lose that.
            self._shifts = (a.mean(0), b.mean(0))
            d = a.shape[1]
            self._sums = [a.new_zeros(d) for _ in range(2)]
            self._products = [a.new_zeros(d, d) for _ in range(3)]
        x, y = a - self._shifts[0], b - self._shifts[1]
        for total, each in zip(self._sums, (x, y), strict=True):
            total += each.sum(0)
        x, y = x.float(), y.float()
        for product, (left, right) in zip(self._products, ((x, x), (y, y), (y, x)), strict=True):
            product += left.T @ right

    def figures(self) -> Similarity:
        """Return the figures of all tokens so far. Raises ValueError if there are none."""
        if self._tokens == 0:
            raise ValueError("two sets of hidden states without tokens have no similarity")
        (xx, yy, yx), (x, y), n = self._products, self._sums, self._tokens
        pairs = ((xx, x, x), (yy, y, y), (yx, y, x))
        ours, theirs, cross = (float((p - torch.outer(u, v) / n).norm()) for p, u, v in pairs)
        return Similarity(
            mse=self._error / (n * len(x)),
            relative_error=self._error / self._energy if self._energy > 0 else None,
            cosine=self._cosine / n,
            cka=cross**2 / (ours * theirs) if ours * theirs > 0 else None,
        )
