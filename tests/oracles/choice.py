"""Textbook choice of a closed form: fit on the tokens of all folds but one, measure on the tokens of that one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracles import closed_forms

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tokens:
    """Of one fold: kept inputs X (N, k), outputs of the whole projection Y (N, d_out), what they lack D (N, d_out)."""

    X: Array
    Y: Array
    D: Array


def together(folds: Sequence[Tokens]) -> Tokens:
    return Tokens(*(np.vstack([getattr(fold, name) for fold in folds]) for name in ("X", "Y", "D")))


def shrunk(base: Array, X: Array, Y: Array, strength: float) -> Array:
    """Regression with k extra tokens √λ e_j; where that has many solutions, the one nearest to `base`."""
    k = X.shape[1]
    rows = np.vstack([X, np.sqrt(strength) * np.eye(k)])
    lacking = np.vstack([Y - X @ base.T, np.zeros((k, base.shape[0]))])
    return base + np.linalg.lstsq(rows, lacking, rcond=1e-10)[0].T


def fitted(method: str, W: Array, X: Array, Y: Array, strength: float) -> closed_forms.Answer:
    nothing = np.zeros(W.shape[0])
    if method == "ridge":
        return shrunk(W, X, Y, strength), nothing
    if method == "grail":
        return shrunk(np.zeros_like(W), X, Y, strength), nothing
    if method == "affine":
        weight = shrunk(W, X - X.mean(0), Y - Y.mean(0), strength)
        return weight, (Y - X @ weight.T).mean(0)
    answer: closed_forms.Answer = getattr(closed_forms, method.replace("-", "_"))(W, X, Y)
    return answer


def held_out_error(
    method: str, W: Array, folds: Sequence[Tokens], value: float, share: float, *, relative: bool = True
) -> float:
    """Σ ‖Y + D − Ŵ X − b‖² over held-out tokens, over Σ ‖Y + D‖²; Ŵ and b are fitted to Y + `share` D of the others."""
    missed = energy = 0.0
    for i, fold in enumerate(folds):
        train = together([other for j, other in enumerate(folds) if j != i])
        strength = value * float(np.mean(np.sum(train.X**2, axis=0))) if relative else value
        answer = fitted(method, W, train.X, train.Y + share * train.D, strength)
        missed += closed_forms.residual(fold.X, fold.Y + fold.D, answer)
        energy += float(np.sum((fold.Y + fold.D) ** 2))
    return missed / energy
