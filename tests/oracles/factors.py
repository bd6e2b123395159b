"""Low rank from its definitions: SVD-LLM's formula on activations, and a minimiser that knows none (README, 13)."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def svd_llm(W: Array, X: Array, rank: int) -> Array:
    """W' = U_r Σ_r V_rᵀ S⁻¹ with S Sᵀ = Xᵀ X (SVD-LLM, Algorithm 1); X (N, d_in), of full rank."""
    S = np.linalg.cholesky(X.T @ X)
    U, values, Vt = np.linalg.svd(W @ S, full_matrices=False)
    return np.asarray((U[:, :rank] * values[:rank]) @ Vt[:rank] @ np.linalg.inv(S))


def truncate(W: Array, X: Array, rank: int) -> Array:
    """The best outputs of a rank, W X's own truncated decomposition, put back onto W; any X."""
    U = np.linalg.svd(W @ X.T, full_matrices=False)[0][:, :rank]
    return np.asarray(U @ (U.T @ W))


def alternating(W: Array, X: Array, rank: int, seed: int, steps: int = 400) -> float:
    """The error ‖(W − A B) Xᵀ‖² that least squares for A and for B in turn comes down to from a random start."""
    A = np.random.default_rng(seed).normal(size=(len(W), rank))
    Y = W @ X.T
    for _ in range(steps):
        codes = np.linalg.lstsq(A, Y, rcond=None)[0]
        A = np.linalg.lstsq(codes.T, Y.T, rcond=None)[0].T
    return float(np.linalg.norm(Y - A @ np.linalg.lstsq(A, Y, rcond=None)[0]) ** 2)


def of_share(W: Array, X: Array, ratio: float) -> Array:
    """W' of the published rank."""
    rows, columns = W.shape
    return truncate(W, X, max(1, int(rows * columns * (1 - ratio) / (rows + columns))))


def solve_update(W: Array, X: Array, D: Array) -> Array:
    """SVD-LLM's update: U of least ‖W Xᵀ − U D Xᵀ‖ by least squares on the outputs themselves; X (N, d_in)."""
    return np.asarray(np.linalg.lstsq(X @ D.T, X @ W.T, rcond=None)[0].T)
