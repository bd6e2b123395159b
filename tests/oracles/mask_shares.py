"""Sharing zeros out over blocks, from the papers' formulae, number by number."""

import math
from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def outlier_ratio(scores: list[Array], threshold: float) -> float:
    every = [value for matrix in scores for value in matrix.ravel()]
    mean = sum(every) / len(every)
    return sum(value > threshold * mean for value in every) / len(every)


def owl(outliers: list[float], ratio: float, spread: float) -> list[float]:
    """Adjust the kept shares as OWL's code does, and return one minus each of them."""
    kept = [(d - min(outliers)) / (max(outliers) - min(outliers)) * 2 * spread for d in outliers]
    kept = [density - sum(kept) / len(kept) + (1 - ratio) for density in kept]
    return [1 - density for density in kept]


def hill(W: Array, bins: int) -> float:
    """Tail from the peak of the histogram of log10 of the eigenvalues, by counting."""
    eigenvalues = sorted(value**2 for value in np.linalg.svd(W, compute_uv=False))
    logs = [math.log10(value) for value in eigenvalues]
    width = (logs[-1] - logs[0]) / bins
    counts = [0] * bins
    for value in logs:
        counts[min(int((value - logs[0]) / width), bins - 1)] += 1
    start = logs[0] + counts.index(max(counts)) * width
    tail = [value for value, log in zip(eigenvalues, logs, strict=True) if log >= start]
    return 1 + len(tail) / sum(math.log(value / tail[0]) for value in tail)


def alpha(exponents: list[float], sizes: list[int], ratio: float, spread: float) -> list[float]:
    low, high = min(exponents), max(exponents)
    shares = [(1 - spread) + (a - low) / (high - low) * 2 * spread for a in exponents]
    scale = ratio * sum(sizes) / sum(d * s for d, s in zip(sizes, shares, strict=True))
    return [scale * share for share in shares]


def least(curves: list[list[float]], kept: int) -> float:
    """Least sum of every way to keep `kept` of M on average in blocks of one size, at the most."""
    of = len(curves[0])
    ways = product(range(1, of + 1), repeat=len(curves))
    return min(
        sum(curve[of - n] for curve, n in zip(curves, way, strict=True))
        for way in ways
        if sum(way) <= kept * len(curves)
    )
