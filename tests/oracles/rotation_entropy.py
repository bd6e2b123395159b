"""Importance of rotated weights and its entropy from DenoiseRotator's tables 5-7 and eq. 5, entry by entry."""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def full_rotation(side: str | None, width: int, residual: Array | None, heads: Array | None) -> Array:
    """The (width, width) matrix that a side is turned by: block-diagonal over heads, R2 repeated over its group."""
    if side == "residual" and residual is not None:
        return residual
    if side == "heads" and heads is not None:
        count, size, _ = heads.shape
        units = width // size
        rotation = np.zeros((width, width))
        for unit in range(units):
            at = unit * size
            rotation[at : at + size, at : at + size] = heads[unit // (units // count)]
        return rotation
    return np.eye(width)


def rotate(W: Array, left: Array, right: Array) -> Array:
    out = np.zeros_like(W)
    for i in range(W.shape[0]):
        for j in range(W.shape[1]):
            out[i, j] = left[:, i] @ W @ right[:, j]
    return out


def importance(backbone: str, W: Array, H: Array, damp: float, left: Array, right: Array) -> Array:
    """Importance of the rotated weights of y = W x, Σ x xᵀ = H; SparseGPT damps H by a share of its mean diagonal."""
    turned = rotate(W, left, right)
    damped = H + damp * np.trace(H) / len(H) * np.eye(len(H))
    inverse = np.linalg.inv(right.T @ damped @ right) if backbone == "sparsegpt" else H
    hessian = right.T @ H @ right
    out = np.zeros_like(W)
    for i in range(W.shape[0]):
        for j in range(W.shape[1]):
            square = turned[i, j] ** 2
            out[i, j] = {
                "magnitude": square,
                "wanda": square * hessian[j, j],
                "sparsegpt": square / inverse[j, j],
            }[backbone]
    return out


def released_divisor(H: Array, damp: float, samples: int, right: Array) -> Array:
    """What SparseGPT's importance is divided by in DenoiseRotator's code: damped before inverting and after."""
    hessian = 2 / samples * H
    for j in range(len(H)):
        if hessian[j, j] == 0:
            hessian[j, j] = 1.0
    added = damp * np.trace(hessian) / len(H) * np.eye(len(H))
    return np.diag(right.T @ (np.linalg.inv(hessian + added) + added) @ right)


def group_entropy(values: Array) -> float:
    total = sum(values)
    return -sum(v / total * math.log(v / total) for v in values if v > 0) if total > 0 else 0.0


def entropy(importance: Array, rows: bool, columns: bool) -> float:
    total = 0.0
    if rows:
        total += sum(group_entropy(row) for row in importance)
    if columns:
        total += sum(group_entropy(column) for column in importance.T)
    return total


def entropy_in_groups(importance: Array, of: int) -> float:
    """Sum the entropy of every group of `of` consecutive weights, times the group's share of its row's importance."""
    total = 0.0
    for row in importance:
        for start in range(0, len(row), of):
            group = row[start : start + of]
            total += group_entropy(group) * (sum(group) / sum(row) if sum(row) > 0 else 0.0)
    return total
