"""How well predicted labels fit the true ones, as GLUE's tasks are scored. Pure functions of two rows."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ckpt_prune.datasets.glue import Metric
from ckpt_prune.evaluation.correlation import pearson, rank_correlation


def accuracy(predicted: Tensor, true: Tensor) -> float:
    """Share of the classes that are right, 0 to 1; both (N,) int64."""
    return float((predicted == true).double().mean())


def f1(predicted: Tensor, true: Tensor) -> float:
    """Harmonic mean of precision and recall of class 1 among two, 0 to 1; 0 where it is neither found nor there."""
    found, there = predicted == 1, true == 1
    both, either = int((found & there).sum()), int(found.sum() + there.sum())
    return 2 * both / either if either else 0.0


def matthews(predicted: Tensor, true: Tensor) -> float:
    """Matthews' correlation of classes, -1 to 1: of the indicators of all classes together (Gorodkin 2004, R_K).

    Of two classes it is (TP TN − FP FN) / √((TP + FP)(TP + FN)(TN + FP)(TN + FN)). 0 where all predictions or all true
    classes are one.
    """
    count = int(max(predicted.max(), true.max())) + 1
    a, b = (torch.nn.functional.one_hot(each, count).double() for each in (predicted, true))
    a, b = a - a.mean(0), b - b.mean(0)
    scale = math.sqrt(float(a.square().sum() * b.square().sum()))
    return float((a * b).sum()) / scale if scale else 0.0


METRICS: dict[Metric, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": rank_correlation,
}
"""Every metric, by its name: predictions and true labels (N,) → the figure."""
