"""Scores of columns from the papers' formulas, token by token, on a weight W (d_out, d) and inputs X (N, d)."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def norm(values: Array) -> float:
    return float(np.sqrt(np.sum(values * values)))


def deviation(x: Array) -> float:
    """Population variance, from deviations rather than from moments."""
    return float(np.mean((x - np.mean(x)) ** 2))


def _per_column(formula):
    return lambda W, X: np.array([formula(W[:, j], X[:, j]) for j in range(X.shape[1])])


SCORES = {
    "magnitude": _per_column(lambda w, x: norm(w)),
    "activation-energy": _per_column(lambda w, x: np.mean(x**2)),
    "active-probability": _per_column(lambda w, x: np.mean(np.abs(x) > 1e-6)),
    "variance": _per_column(lambda w, x: deviation(x)),
    "wanda-sp": _per_column(lambda w, x: norm(w) * norm(x)),
    "wanda-sp-code": _per_column(lambda w, x: np.mean(np.abs(w)) * norm(x)),
    "rcpu": _per_column(lambda w, x: norm(w) * norm(x) * deviation(x)),
    "rcpu-code": _per_column(lambda w, x: norm(w) * np.mean(np.abs(x)) * deviation(x)),
    "flap": _per_column(lambda w, x: deviation(x) * norm(w) ** 2),
    "flap-squared": _per_column(lambda w, x: (deviation(x) * norm(w) ** 2) ** 2),
    "corp": _per_column(lambda w, x: np.mean(x**2) * norm(w)),
}


def kept_units(scores: Array, per_unit: int, keep: int) -> list[int]:
    """The units with the highest sum over their columns, ascending."""
    sums = [float(np.sum(scores[u * per_unit : (u + 1) * per_unit])) for u in range(len(scores) // per_unit)]
    ranked = sorted(range(len(sums)), key=lambda u: (-sums[u], u))
    return sorted(ranked[:keep])
