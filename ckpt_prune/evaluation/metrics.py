"""How well predictions fit the truth, as GLUE's tasks are scored, and how far two rows of numbers go together."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ckpt_prune.datasets.glue import Metric


def accuracy(predicted: Tensor, true: Tensor) -> float:
    """Return the share of the classes that are right; both (N,) int64."""
    return float((predicted == true).double().mean())


def f1(predicted: Tensor, true: Tensor) -> float:
    """Return the harmonic mean of precision and recall of class 1 among two; 0 if it is neither predicted nor true."""
    both = int(((predicted == 1) & (true == 1)).sum())
    total = int((predicted == 1).sum() + (true == 1).sum())
    return 2 * both / total if total else 0.0


def matthews(predicted: Tensor, true: Tensor) -> float:
    """Return Matthews' correlation of classes, -1 to 1: that of the indicators of all classes (Gorodkin 2004, R_K).

    For two classes it is (TP TN − FP FN) / √((TP + FP)(TP + FN)(TN + FP)(TN + FN)). 0 if all predictions or all true
    classes are one.
    """
    count = int(max(predicted.max(), true.max())) + 1
    a, b = (torch.nn.functional.one_hot(each, count).double() for each in (predicted, true))
    a, b = a - a.mean(0), b - b.mean(0)
    scale = math.sqrt(float(a.square().sum() * b.square().sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def pearson(a: Tensor, b: Tensor) -> float:
    """Return the correlation of two rows of numbers, -1 to 1; 0 if all numbers of one are equal."""
    x, y = (each.double() - each.double().mean() for each in (a, b))
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale else 0.0


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's ρ: the correlation of the ranks, equal numbers having their mean rank."""
    return pearson(_rank(a), _rank(b))


def _rank(values: Tensor) -> Tensor:
    _, place, count = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = (count.cumsum(0).double() - (count.double() - 1) / 2)[place]
    return ranks


METRICS: dict[Metric, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": rank_correlation,
}
"""Every metric, by its name: predictions and true labels (N,) → the figure."""
