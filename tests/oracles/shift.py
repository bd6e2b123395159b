"""CORP's Propositions C.1.3 and C.2.3 from tokens, with constants of one: the floor by a regression."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import logits

Array = NDArray[np.float64]


def terms(weight: Array, tokens: Array, others: Array, kept: list[int], strength: float) -> dict[str, Any]:
    """Every figure of `compensation.shift.Shift`, for W (d_out, d) and tokens (N, d) of both texts."""
    gone = [column for column in range(weight.shape[1]) if column not in kept]
    C, theirs = (np.cov(x, rowvar=False, bias=True) for x in (tokens, others))
    apart = tokens.mean(0) - others.mean(0)
    stay = C[np.ix_(kept, kept)]
    least = np.linalg.eigvalsh(stay)[0] + strength / len(tokens)
    inputs = np.column_stack([others[:, kept], np.ones(len(others))])
    lost = others[:, gone] @ weight[:, gone].T
    fitted = inputs @ np.linalg.lstsq(inputs, lost, rcond=None)[0]
    radius = np.mean(np.sum(tokens**2, 1))
    norm = np.sum(weight[:, gone] ** 2)
    gap = np.abs(np.linalg.eigvalsh(C - theirs)).max()
    return {
        "uncompensated": np.mean(np.sum(lost**2, 1)),
        "floor": np.mean(np.sum((lost - fitted) ** 2, 1)),
        "energy": np.mean(np.sum((others @ weight.T) ** 2, 1)),
        "means": np.sum(apart**2) / radius,
        "covariances": gap / np.linalg.norm(C, 2),
        "smallest": least / np.mean(np.diag(stay)),
        "sampling": norm * radius**2 * len(kept) / (least**2 * len(tokens)) * math.log(len(kept) / 0.05),
        "shifting": norm * (gap + np.sum(apart**2)),
    }


def freedom(inputs: Array, outputs: int, strength: float, centred: bool) -> float:
    """Effective degrees of freedom of ridge regression: d_out Σ σ² / (σ² + λ), σ the inputs' singular values."""
    values = np.linalg.svd(inputs - inputs.mean(0) * centred, compute_uv=False) ** 2
    return outputs * float(np.sum(values / (values + strength))) + outputs * centred


def head_terms(
    samples: list[logits.Samples], others: list[logits.Samples], kept: list[list[int]], strength: list[float]
) -> dict[str, Any]:
    """The same figures of `compensation.head_shift`, for queries and keys of every head of both texts."""
    count, other_count = len(samples[0]), len(others[0])
    gap = norm = apart = right = sampling = 0.0
    shares = []
    for ours, theirs, at, value in zip(samples, others, kept, strength, strict=True):
        (G, h), (G2, h2) = logits.kronecker(ours, at), logits.kronecker(theirs, at)
        gap += np.linalg.norm(G / count - G2 / other_count, 2)
        norm += np.linalg.norm(G / count, 2)
        apart += np.sum((h / count - h2 / other_count) ** 2)
        right += np.sum((h / count) ** 2)
        least = np.linalg.eigvalsh(G)[0] / count + value / count
        shares.append(least / np.mean(np.diag(G / count)))
        dims = range(ours[0][0].shape[1])
        radius = max(
            np.mean([np.sum(Q[:, i] ** 2) * np.sum(K[:, j] ** 2) for Q, K in ours]) for i in dims for j in dims
        )
        sampling += radius * len(at) ** 2 / (least**2 * count) * math.log(len(at) / 0.05)
    pairs = list(zip(others, kept, strict=True))
    return {
        "uncompensated": sum(logits.error(data, at, np.zeros((len(at),) * 2)) for data, at in pairs) / other_count,
        "floor": sum(logits.floor(data, at) for data, at in pairs) / other_count,
        "energy": sum(map(logits.energy, others)) / other_count,
        "means": apart / right,
        "covariances": gap / norm,
        "smallest": min(shares),
        "sampling": sampling,
        "shifting": gap + apart,
    }
