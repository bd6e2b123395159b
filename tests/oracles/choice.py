"""Textbook choice of a closed form: fit on the tokens of all folds but one, measure on the tokens of that one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracles import closed_forms

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tokens:
    """Holds one fold: kept inputs X (N, k), whole outputs Y (N, d_out), and what these lack, D (N, d_out)."""

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


def fit_answer(method: str, W: Array, X: Array, Y: Array, strength: float) -> closed_forms.Answer:
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


def held_out(counts: Sequence[int], kept: int) -> list[int]:
    """Which folds are held out: all, or the first and the middle one if 8 training tokens a kept input are left."""
    two = [0, len(counts) // 2]
    plenty = all(counts[i] > 0 and sum(counts) - counts[i] >= 8 * kept for i in two)
    return two if plenty else [i for i, count in enumerate(counts) if count > 0]


def least_error(method: str, W: Array, folds: Sequence[Tokens]) -> float:
    """Return the method's relative error on the folds of `held_out_error`, after a fit to all tokens at α = 1."""
    all_tokens = together(folds)
    answer = fit_answer(method, W, all_tokens.X, all_tokens.Y + all_tokens.D, 0.0)
    validation = together([folds[i] for i in held_out([len(fold.X) for fold in folds], W.shape[1])])
    return closed_forms.residual(validation.X, validation.Y + validation.D, answer) / float(
        np.sum((validation.Y + validation.D) ** 2)
    )


def held_out_error(
    method: str, W: Array, folds: Sequence[Tokens], value: float, share: float, *, relative: bool = True
) -> float:
    """Σ ‖Y + D − Ŵ X − b‖² over held-out tokens, over Σ ‖Y + D‖²; Ŵ and b are fitted to Y + `share` D of the others."""
    missed = energy = 0.0
    for i in held_out([len(fold.X) for fold in folds], W.shape[1]):
        fold = folds[i]
        train = together([other for j, other in enumerate(folds) if j != i])
        strength = value * float(np.mean(np.sum(train.X**2, axis=0))) if relative else value
        answer = fit_answer(method, W, train.X, train.Y + share * train.D, strength)
        missed += closed_forms.residual(fold.X, fold.Y + fold.D, answer)
        energy += float(np.sum((fold.Y + fold.D) ** 2))
    return missed / energy
