"""Directions of the values of one KV head, on the activations of its query heads: float64, plain."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def directions(W: Sequence[Array], X: Sequence[Array]) -> tuple[Array, Array, Array]:
    """Return directions from the SVD of M^½ Σ^½: into them Q (d, d), back P (d, d), and squared singular values.

    Args:
        W: columns (d_out, d) of every query head of the KV head.
        X: inputs (N, d) of the same.
    """
    metric = sum((w.T @ w for w in W), np.zeros((W[0].shape[1],) * 2))
    moment = sum((x.T @ x for x in X), np.zeros((X[0].shape[1],) * 2))
    root, other = _root(moment), _root(metric)
    _, values, Vt = np.linalg.svd(other @ root)
    return np.linalg.inv(root) @ Vt.T, root @ Vt.T, values**2


def lost(W: Array, X: Array, Q: Array, P: Array) -> float:
    """Σ ‖W x − W P Qᵀ x‖² of one head, token by token."""
    return float(sum(np.sum((W @ x - W @ P @ (Q.T @ x)) ** 2) for x in X))


def least(W: Array, X: Array, keep: int, *, starts: int = 5, seed: int = 0) -> float:
    """The least of `lost` over all P and Q (d, keep), by alternating regressions from random starts."""
    errors = []
    generator = np.random.default_rng(seed)
    for _ in range(starts):
        Q = generator.standard_normal((X.shape[1], keep))
        for _ in range(400):
            read = np.linalg.lstsq(X @ Q, X @ W.T, rcond=None)[0].T
            # Which values read so are nearest: Q of the regression of what is wanted on all values.
            V = np.linalg.lstsq(read, W @ X.T, rcond=None)[0]
            Q = np.linalg.lstsq(X, V.T, rcond=None)[0]
        read = np.linalg.lstsq(X @ Q, X @ W.T, rcond=None)[0].T
        errors.append(float(np.sum((X @ W.T - X @ Q @ read.T) ** 2)))
    return min(errors)


def _root(gram: Array) -> Array:
    values, vectors = np.linalg.eigh(gram)
    root: Array = vectors @ np.diag(np.sqrt(np.clip(values, 0, None))) @ vectors.T
    return root
