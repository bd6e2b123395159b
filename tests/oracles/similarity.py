"""Mean squared error and CKA of whole matrices X, Y (tokens, d) in float64, the latter from kernels over tokens."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mse(X: Array, Y: Array) -> float:
    return sum((x - y) ** 2 for x, y in zip(X.ravel(), Y.ravel(), strict=True)) / X.size


def hsic(K: Array, L: Array) -> float:
    """Tr(KHLH), the factor 1 / (n − 1)² left out as it cancels."""
    n = len(K)
    H = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(K @ H @ L @ H))


def cka(X: Array, Y: Array) -> float:
    """CKA of the linear kernels K = XXᵀ, L = YYᵀ (Kornblith et al. 2019)."""
    K, L = X @ X.T, Y @ Y.T
    return hsic(K, L) / np.sqrt(hsic(K, K) * hsic(L, L))
