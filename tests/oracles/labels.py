"""Metrics of labelled texts by their textbook definitions, one text after the other."""

import math
from collections.abc import Sequence


def counts(predicted: Sequence[int], true: Sequence[int]) -> tuple[int, int, int, int]:
    """True and false positives and negatives of class 1: TP, FP, FN, TN."""
    pairs = list(zip(predicted, true, strict=True))
    return (
        sum(p == 1 and t == 1 for p, t in pairs),
        sum(p == 1 and t != 1 for p, t in pairs),
        sum(p != 1 and t == 1 for p, t in pairs),
        sum(p != 1 and t != 1 for p, t in pairs),
    )


def f1(predicted: Sequence[int], true: Sequence[int]) -> float:
    tp, fp, fn, _ = counts(predicted, true)
    precision, recall = (tp / n if n else 0.0 for n in (tp + fp, tp + fn))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def matthews(predicted: Sequence[int], true: Sequence[int]) -> float:
    tp, fp, fn, tn = counts(predicted, true)
    scale = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return (tp * tn - fp * fn) / scale if scale else 0.0


def matthews_of_many(predicted: Sequence[int], true: Sequence[int]) -> float:
    """R_K from the confusion matrix, as Gorodkin (2004) has it."""
    classes = range(max(*predicted, *true) + 1)
    pairs = list(zip(predicted, true, strict=True))
    C = [[sum(p == k and t == j for p, t in pairs) for j in classes] for k in classes]
    total = range(len(classes))
    above = sum(C[k][k] * C[j][m] - C[k][j] * C[m][k] for k in total for j in total for m in total)
    rows, columns = [sum(C[k]) for k in total], [sum(C[k][j] for k in total) for j in total]
    n = len(pairs)
    scale = math.sqrt(sum(r * (n - r) for r in rows)) * math.sqrt(sum(c * (n - c) for c in columns))
    return above / scale if scale else 0.0


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
    x, y = (sum(values) / len(values) for values in (a, b))
    above = sum((p - x) * (q - y) for p, q in zip(a, b, strict=True))
    scale = math.sqrt(sum((p - x) ** 2 for p in a) * sum((q - y) ** 2 for q in b))
    return above / scale if scale else 0.0
