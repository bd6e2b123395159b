"""The map that makes up for blocks that are gone, on all tokens at once: float64, plain."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def ridge_map(Z: Array, Y: Array, strength: float, *, biased: bool) -> tuple[Array, Array]:
    """T and b of least Σ ‖y − T z − b‖² + λ ‖T − I‖², as one least squares problem with the penalty as rows of its own.

    λ is the strength times the mean square of an input, summed over tokens. Without a bias b is zero.

    Args:
        Z: (N, d).
        Y: (N, d).
        strength: relative.
        biased: whether there is a b.
    """
    width = Z.shape[1]
    penalty = np.sqrt(strength * np.square(Z).sum() / width) * np.eye(width)
    mean_z, mean_y = (Z.mean(0), Y.mean(0)) if biased else (np.zeros(width), np.zeros(width))
    A = np.concatenate([Z - mean_z, penalty])
    B = np.concatenate([Y - mean_y, penalty])
    T = np.linalg.lstsq(A, B, rcond=None)[0].T
    return T, mean_y - T @ mean_z


def held_out(Z: list[Array], Y: list[Array], strength: float, *, biased: bool) -> float:
    """Σ ‖y − T z − b‖² over Σ ‖y‖², every fold by the map of the others."""
    lost = 0.0
    for fold in range(len(Z)):
        others = [i for i in range(len(Z)) if i != fold]
        T, b = ridge_map(
            np.concatenate([Z[i] for i in others]), np.concatenate([Y[i] for i in others]), strength, biased=biased
        )
        lost += float(np.square(Y[fold] - Z[fold] @ T.T - b).sum())
    return lost / float(sum(np.square(y).sum() for y in Y))
