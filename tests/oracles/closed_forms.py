"""Textbook versions of the closed forms, on activations X (N, d) and targets Y (N, d_out): float64, slow, plain."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Answer = tuple[Array, Array]
"""Ŵ (d_out, k) and the bias to add (d_out,), zero where the method has none."""


def residual(X: Array, Y: Array, answer: Answer) -> float:
    """Σ ‖y − Ŵ x − b‖², token by token."""
    return float(sum(np.sum((y - answer[0] @ x - answer[1]) ** 2) for x, y in zip(X, Y, strict=True)))


def none(W: Array, X: Array, Y: Array) -> Answer:
    return W, np.zeros(W.shape[0])


def bias(W: Array, X: Array, Y: Array) -> Answer:
    return W, (Y - X @ W.T).mean(0)


def full_rotation(W: Array, X: Array, Y: Array) -> Array:
    """Q (d_out, d_out) of orthogonal Procrustes from the pruned outputs to the targets."""
    u, _, vt = np.linalg.svd(Y.T @ (X @ W.T))
    return u @ vt


def rotation(W: Array, X: Array, Y: Array) -> Answer:
    return full_rotation(W, X, Y) @ W, np.zeros(W.shape[0])


def rotation_scale(W: Array, X: Array, Y: Array) -> Answer:
    turned = X @ (full_rotation(W, X, Y) @ W).T
    # The best scale of a given direction is a one-dimensional regression.
    scale = np.sum(turned * Y) / np.sum(turned * turned)
    return scale * full_rotation(W, X, Y) @ W, np.zeros(W.shape[0])


def centred_rotation(W: Array, X: Array, Y: Array) -> Answer:
    turned = full_rotation(W, X - X.mean(0), Y - Y.mean(0)) @ W
    return turned, (Y - X @ turned.T).mean(0)


def least_squares(W: Array, X: Array, Y: Array) -> Answer:
    """Minimum-norm regression of the targets on the pruned outputs."""
    transform = np.linalg.lstsq(X @ W.T, Y, rcond=1e-8)[0].T
    return transform @ W, np.zeros(W.shape[0])


def ridge(W: Array, X: Array, Y: Array, strength: float) -> Answer:
    """Regression with k extra tokens √λ e_j whose target is √λ W e_j."""
    k = X.shape[1]
    X = np.vstack([X, np.sqrt(strength) * np.eye(k)])
    Y = np.vstack([Y, np.sqrt(strength) * W.T])
    return np.linalg.lstsq(X, Y, rcond=None)[0].T, np.zeros(W.shape[0])


def bayes(W: Array, X: Array, Y: Array, change: float, noise: float) -> Answer:
    """Posterior mean of Ŵ, output by output, where Ŵ is W plus independent changes and Y is seen through noise.

    Args:
        change, noise: variances of a change of a weight and of an output's noise.
    """
    precision = np.eye(X.shape[1]) / change + sum(np.outer(x, x) for x in X) / noise
    means = [
        np.linalg.inv(precision) @ (w / change + sum(x * v for x, v in zip(X, y, strict=True)) / noise)
        for w, y in zip(W, Y.T, strict=True)
    ]
    return np.array(means), np.zeros(W.shape[0])


def affine(W: Array, X: Array, Y: Array, strength: float) -> Answer:
    weight, _ = ridge(W, X - X.mean(0), Y - Y.mean(0), strength)
    return weight, (Y - X @ weight.T).mean(0)


def grail(W: Array, X: Array, Y: Array, strength: float) -> Answer:
    return ridge(np.zeros_like(W), X, Y, strength)


def corp(W: Array, X: Array, kept: Array, dropped: Array, strength: float) -> Answer:
    """CORP eq. 7-9 as printed: B = Σ_PS (Σ_SS + λ I)⁻¹ on covariances per token, c = μ_P − B μ_S."""
    covariance, mean = np.cov(X.T, bias=True), X.mean(0)
    shifted = covariance[np.ix_(kept, kept)] + strength * np.eye(len(kept))
    B = covariance[np.ix_(dropped, kept)] @ np.linalg.inv(shifted)
    return W[:, kept] + W[:, dropped] @ B, W[:, dropped] @ (mean[dropped] - B @ mean[kept])


def schur_floor(W: Array, X: Array, kept: Array, dropped: Array) -> tuple[float, float, float]:
    """J0 token by token, J* by the Schur complement, ρ² (CORP C.1), all per token."""
    covariance = np.cov(X.T, bias=True)
    cross = covariance[np.ix_(dropped, kept)]
    conditional = (
        covariance[np.ix_(dropped, dropped)]
        - cross @ np.linalg.pinv(covariance[np.ix_(kept, kept)], rcond=1e-10) @ cross.T
    )
    lost = W[:, dropped]
    spread = float(np.trace(lost @ covariance[np.ix_(dropped, dropped)] @ lost.T))
    floor = float(np.trace(lost @ conditional @ lost.T))
    return float(np.mean(np.sum((X[:, dropped] @ lost.T) ** 2, axis=1))), floor, 1 - floor / spread
