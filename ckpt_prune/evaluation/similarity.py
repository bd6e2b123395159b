"""How alike two models' hidden states are, token by token and as wholes, from sums (LaCo, appendix B)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite

_PAIRS = ((0, 0), (1, 1), (0, 1))
"""Which side meets which in the Grams: ours with ours, theirs with theirs, ours with theirs."""


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


class StateSimilarity:
    """Adds up, batch by batch, what `Similarity` is made from. Work: 6 d² flops a token.

    Between batches it holds three (d, d) float64 matrices, on the device of the first batch, for any number of tokens.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._width = 0
        self._squared_error = self._energy = self._cosine = 0.0
        self._is_finite = True
        # Of ours and of theirs. Sums and Grams are of tokens less the shift, in units of the largest of these so far.
        self._shifts: list[Tensor] = []
        self._units = [0.0, 0.0]
        self._sums: list[Tensor] = []
        self._grams: list[Tensor] = []

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        """Add a batch; theirs is the reference.

        Hidden states are (..., d), any floating dtype, all leading axes being tokens; both sides have the same shape
        and device.
        """
        if ours.shape != theirs.shape:
            raise ValueError(
                f"hidden states of shapes {tuple(ours.shape)} and {tuple(theirs.shape)} cannot be compared"
            )
        if self._tokens and ours.shape[-1] != self._width:
            raise ValueError(f"hidden states of width {ours.shape[-1]} after batches of width {self._width}")
        if not ours.numel():
            return
        sides = [side.detach().reshape(-1, side.shape[-1]).double() for side in (ours, theirs)]
        self._tokens += len(sides[0])
        self._width = ours.shape[-1]
        self._squared_error += float((sides[0] - sides[1]).square_().sum())
        norms = [side.square().sum(1) for side in sides]
        both = (norms[0] * norms[1]).sqrt()
        cosines = torch.where(both > 0, (sides[0] * sides[1]).sum(1) / both, (norms[0] == norms[1]).double())
        self._energy += float(norms[1].sum())
        self._cosine += float(cosines.sum())
        self._is_finite = self._is_finite and all(map(all_finite, sides))
        if self._is_finite:
            is_double = torch.promote_types(ours.dtype, theirs.dtype) == torch.float64
            self._add_moments(sides, torch.float64 if is_double else torch.float32)

    def _add_moments(self, sides: list[Tensor], product_dtype: torch.dtype) -> None:
        """Add finite tokens (n, d) float64 of both sides; the matrix products are taken in `product_dtype`."""
        # CKA knows no scale; of a quarter, the difference of any two doubles is finite.
        sides = [side / 4 for side in sides]
        if not self._grams:
            self._shifts = [_mean(side) for side in sides]
            self._sums = [torch.zeros_like(shift) for shift in self._shifts]
            self._grams = [self._shifts[0].new_zeros(self._width, self._width) for _ in _PAIRS]
        growth = [1.0, 1.0]
        for i, side in enumerate(sides):
            side -= self._shifts[i]
            unit = max(self._units[i], float(side.abs().max()))
            if unit:
                # Squares of large or small float32 values leave its range; in units of the largest they do not.
                side /= unit
                growth[i] = self._units[i] / unit
                self._units[i] = unit
            self._sums[i].mul_(growth[i]).add_(side.sum(0))
        # A batch is multiplied about its own mean: far from the first batch, float32 would lose what varies within it.
        means = [side.mean(0) for side in sides]
        narrow = [(side - mean).to(product_dtype) for side, mean in zip(sides, means, strict=True)]
        for gram, (i, j) in zip(self._grams, _PAIRS, strict=True):
            gram.mul_(growth[i] * growth[j]).add_(narrow[i].T @ narrow[j])
            gram.addr_(means[i], means[j], alpha=len(sides[0]))

    def figures(self) -> Similarity:
        """Return the figures of all tokens so far. Raises ValueError if there are none."""
        mse, cka = self.mse, self.cka
        return Similarity(
            mse=mse,
            relative_error=self._squared_error / self._energy if self._energy > 0 else None,
            cosine=self._cosine / self._tokens,
            cka=cka if math.isfinite(cka) and all(self._units) else None,
        )

    @property
    def mse(self) -> float:
        """Mean over elements of (ours − theirs)²; inf or nan if a hidden state was not finite."""
        self._require_tokens()
        return self._squared_error / (self._tokens * self._width)

    @property
    def cka(self) -> float:
        """Linear CKA, ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) of features centred over tokens (Kornblith et al. 2019), in [0, 1].

        It is 1 if neither side varies over the tokens (CKA does not see an offset between them), 0 if just one does
        not, and nan if a hidden state was not finite.
        """
        self._require_tokens()
        if not self._is_finite:
            return math.nan
        if not all(self._units):
            return 0.0 if any(self._units) else 1.0
        xx, yy, xy = (
            float(torch.linalg.matrix_norm(torch.addr(gram, self._sums[i], self._sums[j], alpha=-1 / self._tokens)))
            for gram, (i, j) in zip(self._grams, _PAIRS, strict=True)
        )
        return min(xy * xy / (xx * yy), 1.0)

    def _require_tokens(self) -> None:
        if not self._tokens:
            raise ValueError("no hidden states were added, so there is nothing to compare")


def _mean(tokens: Tensor) -> Tensor:
    """Return the mean token (d,) of (n, d): exactly the token if all are equal, so that constants stay constant."""
    first = tokens[0]
    return first + ((tokens - first) / len(tokens)).sum(0)
