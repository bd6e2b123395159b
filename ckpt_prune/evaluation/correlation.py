"""How far two rows of numbers go together. Pure functions."""

import torch
from torch import Tensor


def pearson(a: Tensor, b: Tensor) -> float:
    """Correlation of two rows of numbers, -1 to 1; 0 where all of one are equal."""
    x, y = (each.double() - each.double().mean() for each in (a, b))
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale else 0.0


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's ρ of two rows of numbers: the correlation of their ranks, equal numbers having their mean rank.

    0 where all numbers of one are equal.
    """
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: Tensor) -> Tensor:
    _, place, count = torch.unique(values, return_inverse=True, return_counts=True)
    ends = count.cumsum(0).double()
    found: Tensor = (ends - (count.double() - 1) / 2)[place]
    return found
