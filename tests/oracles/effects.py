"""Definitions of what pruning one site alone does to a whole model's output: float64, everything from scratch."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def log_softmax(row: Array) -> Array:
    top = float(np.max(row))
    return row - top - np.log(np.sum(np.exp(row - top)))


def kl(reference: Array, logits: Array) -> float:
    """Σ p log(p / q) of each position of each sample, the mean over a sample's positions, summed over samples."""
    total = 0.0
    for theirs, ours in zip(reference, logits, strict=True):
        rows = zip(theirs.reshape(-1, theirs.shape[-1]), ours.reshape(-1, ours.shape[-1]), strict=True)
        divergences = [float(np.sum(np.exp(log_softmax(p)) * (log_softmax(p) - log_softmax(q)))) for p, q in rows]
        total += sum(divergences) / len(divergences)
    return total


def relative(reference: Array, states: Array) -> float:
    """‖h′ − h‖² / ‖h‖², sample by sample."""
    return sum(float(np.sum((b - a) ** 2) / np.sum(a**2)) for a, b in zip(reference, states, strict=True))


def least_loss(W: Array, G: Array, kept: Sequence[int]) -> float:
    """tr (W − Ŵ) G (W − Ŵ)ᵀ of the Ŵ of least loss on the kept columns."""
    lost = W.copy()
    lost[:, kept] -= np.linalg.solve(G[np.ix_(kept, kept)], G[kept] @ W.T).T
    return float(np.sum((lost @ G) * lost))


def columns_of(units: Iterable[int], per_unit: int) -> list[int]:
    return [unit * per_unit + i for unit in units for i in range(per_unit)]


def removal(W: Array, X: Array, per_unit: int, *, damp: float) -> list[int]:
    """Units in the order they go: always the one without which the others do best, each refitted from scratch."""
    G = X.T @ X
    G += damp * np.mean(np.diag(G)) * np.eye(len(G))
    remaining, order = list(range(X.shape[1] // per_unit)), []
    while remaining:
        losses = [least_loss(W, G, columns_of([v for v in remaining if v != u], per_unit)) for u in remaining]
        order.append(remaining.pop(int(np.argmin(losses))))
    return order
