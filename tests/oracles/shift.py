"""CORP's Proposition C.1.3 from tokens, with constants of one: covariances by numpy, the floor by a regression."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def terms(weight: Array, tokens: Array, others: Array, kept: list[int], strength: float) -> dict[str, Any]:
    """Every figure of `compensation.shift.Shift`, for W (d_out, d) and tokens (N, d) of both texts."""
    gone = [column for column in range(weight.shape[1]) if column not in kept]
    own, theirs = (np.cov(x, rowvar=False, bias=True) for x in (tokens, others))
    apart = tokens.mean(0) - others.mean(0)
    stay = own[np.ix_(kept, kept)]
    least = np.linalg.eigvalsh(stay)[0] + strength / len(tokens)
    inputs = np.column_stack([others[:, kept], np.ones(len(others))])
    lost = others[:, gone] @ weight[:, gone].T
    fitted = inputs @ np.linalg.lstsq(inputs, lost, rcond=None)[0]
    radius = np.mean(np.sum(tokens**2, 1))
    norm = np.sum(weight[:, gone] ** 2)
    gap = np.abs(np.linalg.eigvalsh(own - theirs)).max()
    return {
        "uncompensated": np.mean(np.sum(lost**2, 1)),
        "floor": np.mean(np.sum((lost - fitted) ** 2, 1)),
        "energy": np.mean(np.sum((others @ weight.T) ** 2, 1)),
        "means": np.sum(apart**2) / radius,
        "covariances": gap / np.linalg.norm(own, 2),
        "smallest": least / np.mean(np.diag(stay)),
        "sampling": norm * radius**2 * len(kept) / (least**2 * len(tokens)) * math.log(len(kept) / 0.05),
        "shifting": norm * (gap + np.sum(apart**2)),
    }
