"""λ chosen on held-out tokens, in closed form: train on all folds but one, score on that one (METHODS section 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import Fit, Fold, error
from ckpt_prune.compensation.least_squares import reciprocals
from ckpt_prune.compensation.methods import Method, Units, absolute_lambda


@dataclass(frozen=True)
class Choice:
    """The λ chosen and what it was chosen by.

    Attributes:
        value: in the units of the grid; of two with equal errors the larger, which changes the weights less.
        errors: held-out error of each λ of the grid, relative: Σ held-out error / Σ target energy.
    """

    value: float
    errors: dict[float, float]


def choose_lambda(
    method: Method, weight_kept: Tensor, folds: Sequence[Fit], grid: Sequence[float], units: Units = "relative"
) -> Choice:
    """The λ of `grid` with the least held-out error over `folds`.

    Each training Gram is decomposed once; a λ then costs O(k²) a fold.

    Args:
        method: one that uses λ.
        weight_kept: W_K, (d_out, k) float64.
        folds: fits of disjoint tokens, with second moments.
        grid: values to try, none negative.
        units: of the grid; a relative λ is relative to the training folds' Gram.

    Raises:
        ValueError: fewer than two folds, an empty grid, or a method without λ.
    """
    if len(folds) < 2:
        raise ValueError(f"choosing lambda on held-out tokens needs at least 2 folds, not {len(folds)}")
    if not grid:
        raise ValueError("choosing lambda needs at least one value to try")
    if method.shrinks_to is None:
        raise ValueError(f"method {method.name!r} has no lambda to choose")
    base = weight_kept if method.shrinks_to == "kept" else torch.zeros_like(weight_kept)
    total = reduce(add, folds)
    sums = dict.fromkeys(grid, 0.0)
    for fold in folds:
        train = total - fold
        strengths = [absolute_lambda(value, units, train) for value in grid]
        for value, held_out in zip(grid, _held_out(base, train, fold, strengths, method.adds_bias), strict=True):
            sums[value] += held_out
    energy = total.second_moments()[2]
    errors = {value: held_out / energy if energy > 0 else 0.0 for value, held_out in sums.items()}
    return Choice(min(errors, key=lambda value: (errors[value], -value)), errors)


def _held_out(base: Tensor, train: Fit, fold: Fit, strengths: Sequence[float], centred: bool) -> Iterator[float]:
    """Σ ‖y − Ŵ(λ) x − b(λ)‖² over the tokens of `fold`, of what `train` gives for each λ."""
    if centred:
        # With b = μ_y − Ŵ μ the error is that of Ŵ alone once both fits are measured from the training means.
        train, fold = train.shifted(train.mean, train.target_mean), fold.shifted(train.mean, train.target_mean)
    gram, cross, _ = train.second_moments()
    fold_gram, fold_cross, _ = fold.second_moments()
    values, vectors = torch.linalg.eigh(gram)
    # In the eigenbasis Ŵ(λ) − base is `pull` with column j divided by value_j + λ, so that the error on the fold,
    # quadratic in Ŵ, is a quadratic form in those reciprocals.
    pull = (cross - base @ gram) @ vectors
    slope = (pull * ((fold_cross - base @ fold_gram) @ vectors)).sum(0)
    curve = (pull.T @ pull) * (vectors.T @ fold_gram @ vectors)
    start = error(Fold(base), fold)
    for strength in strengths:
        scale = reciprocals(values + strength)
        yield max(start + float(scale @ (curve @ scale) - 2 * (slope @ scale)), 0.0)
