"""Scores of single weights, and masks with exact counts. Pure functions.

See sparsity/README.md, sections 1 and 2.

Scores are (d_out, d_in) float64, higher = keep. A mask is (d_out, d_in) bool, True = stays. Of equal scores the lower
index stays, so that a mask depends neither on the device nor on the order in which a sort visits them.
"""

from decimal import ROUND_FLOOR, Decimal

import torch
from torch import Tensor

from ckpt_prune.common.zero_patterns import Compare, GroupPattern
from ckpt_prune.measure.moments.inputs import Moments


def zeros_of(total: int, ratio: float) -> int:
    """Return the share `ratio` of `total` weights, rounded down to a whole number.

    The product is taken in decimal, as the ratio is written: 0.29 of 100 is 29, where binary floats would give 28.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"a share of the weights lies between 0 and 1, not {ratio}")
    return int((Decimal(total) * Decimal(repr(float(ratio)))).to_integral_value(ROUND_FLOOR))


def magnitude(weight: Tensor) -> Tensor:
    """Return |W| of a weight of any floating dtype."""
    return weight.double().abs()


def wanda(weight: Tensor, moments: Moments) -> Tensor:
    """Return |W_ij| ‖X_j‖₂, the score of Wanda (Sun et al. 2023, arXiv 2306.11695, eq. 1).

    `moments` are of the layer's input, width d_in.
    """
    if moments.width != weight.shape[1]:
        raise ValueError(f"moments of width {moments.width} do not fit a weight of {weight.shape[1]} inputs")
    return magnitude(weight) * moments.square.sqrt()


def keep_share(scores: Tensor, ratio: float, compare: Compare) -> Tensor:
    """Return the mask that drops a share `ratio` of the weights, the lowest scores first.

    With compare "row" every row is ranked by itself, and loses `zeros_of(d_in, ratio)`. With "matrix" there is one
    ranking of all weights, which loses `zeros_of(d_out * d_in, ratio)`; indices count row by row.
    """
    _refuse_nan(scores)
    rows = scores if compare == "row" else scores.reshape(1, -1)
    zeros = zeros_of(rows.shape[1], ratio)
    if zeros == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    # No whole ranking is needed: only the score at which it is cut, and which weights stay of those that tie there.
    cut = _kth_lowest(rows, zeros)
    keep = rows > cut
    tied = rows == cut
    vacant = rows.shape[1] - zeros - keep.sum(1, keepdim=True)
    keep |= tied & (tied.cumsum(1) <= vacant)
    return keep.view_as(scores)


def keep_groups(scores: Tensor, pattern: GroupPattern) -> Tensor:
    """Return the mask that keeps the N highest scores in every group of M consecutive columns of a row."""
    check_width(scores.shape[1], pattern)
    _refuse_nan(scores)
    groups = scores.reshape(scores.shape[0], -1, pattern.of)
    best = torch.sort(groups, descending=True, stable=True).indices[..., : pattern.kept]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, best, True).view_as(scores)


def check_width(width: int, pattern: GroupPattern) -> None:
    """Refuse rows that cannot be divided into groups of M."""
    if width % pattern.of:
        raise ValueError(f"pattern {pattern} needs a width divisible by {pattern.of}, and {width} is not")


def _kth_lowest(rows: Tensor, k: int) -> Tensor:
    """Return the k-th lowest value of every row of (r, n), 1 <= k <= n: (r, 1)."""
    # Selecting is many times faster than sorting on a CPU, and slower on a GPU, where few rows leave it idle.
    if rows.is_cuda:
        return torch.sort(rows, dim=1).values[:, k - 1 : k]
    return torch.kthvalue(rows, k, dim=1, keepdim=True).values


def _refuse_nan(scores: Tensor) -> None:
    if bool(scores.isnan().any()):
        raise ValueError("a score is not a number: the weight or the moments hold infinities or NaN")
