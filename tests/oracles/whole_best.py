"""Budgets and choices of whole models by the definitions: every width tried, every fit from tokens."""

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from .choice import Tokens, held_out_error, least_error

Array = NDArray[np.float64]


class Site(NamedTuple):
    """Errors with 0, 1, ... units dropped, what a unit costs, and what its width is a multiple of, unless whole."""

    errors: Array
    cost: int
    multiple: int = 1


def least(groups: Sequence[Sequence[Site]], budget: int) -> float:
    """The least total error of all widths that fit; the sites of one group have one width."""
    spent, missed = np.zeros(1), np.zeros(1)
    for sites in groups:
        units = len(sites[0].errors) - 1
        widths = [kept for kept in range(1, units + 1) if kept == units or kept % sites[0].multiple == 0]
        costs = [sum(site.cost * kept for site in sites) for kept in widths]
        errors = [sum(float(site.errors[units - kept]) for site in sites) for kept in widths]
        spent, missed = np.add.outer(spent, costs).ravel(), np.add.outer(missed, errors).ravel()
    return float(missed[spent <= budget].min())


def total(groups: Sequence[Sequence[Site]], kept: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Error and cost of some widths."""
    pairs = [pair for sites, widths in zip(groups, kept, strict=True) for pair in zip(sites, widths, strict=True)]
    error = sum(float(site.errors[len(site.errors) - 1 - width]) for site, width in pairs)
    return error, sum(site.cost * width for site, width in pairs)


def as_shares(errors: Array) -> Array:
    return errors / errors[-1]


def as_effects(errors: Array, effects: Sequence[tuple[int, float]]) -> Array:
    """Errors times the effect of one unit of error, which goes straight from one measured point to the next."""
    worth = [(k, effect / errors[k]) for k, effect in effects]
    effective = []
    for k, error in enumerate(errors):
        if k <= worth[0][0]:
            factor = worth[0][1]
        elif k >= worth[-1][0]:
            factor = worth[-1][1]
        else:
            (a, f0), (b, f1) = next((one, two) for one, two in pairwise(worth) if one[0] <= k <= two[0])
            factor = f0 + (f1 - f0) * (k - a) / (b - a)
        effective.append(error * factor)
    return np.array(effective)


def read(folder: Path) -> dict[str, Array]:
    """Every tensor of a folder's weights as stored."""
    return {
        name: values for file in sorted(folder.glob("model*.safetensors")) for name, values in load_file(file).items()
    }


def sizes(folder: Path) -> tuple[int, int]:
    """Numbers and bytes of a folder's weights."""
    tensors = read(folder).values()
    return sum(values.size for values in tensors), sum(values.nbytes for values in tensors)


class Trial(NamedTuple):
    method: str
    strength: float | None
    share: float
    error: float


LAMBDALESS = ("none", "bias", "rotation", "rotation-scale", "centred-rotation", "least-squares")


BOUNDED = ("rotation", "rotation-scale", "centred-rotation", "least-squares")


def choose(
    W: Array, folds: Sequence[Tokens], methods: Sequence[str], grid: Sequence[float], shares: Sequence[float]
) -> list[Trial]:
    """The best trial of each method, the best method first; of equals the larger λ, then the smaller share.

    A form that a better one is known for has as its error the bound of it.
    """
    best = []
    for method in methods:
        strengths: list[float | None] = [None] if method in LAMBDALESS else sorted(grid, reverse=True)
        trials = [
            Trial(method, strength, share, held_out_error(method, W, folds, strength or 0.0, share))
            for strength, share in product(strengths, sorted(shares))
        ]
        lowest = min(trial.error for trial in trials)
        best.append(next(trial for trial in trials if trial.error <= lowest * (1 + 1e-9)))
    least = min((trial.error for trial in best if trial.method not in BOUNDED), default=np.inf)
    for place, trial in enumerate(best):
        if trial.method in BOUNDED and (bound := least_error(trial.method, W, folds)) > least:
            assert trial.error >= bound * (1 - 1e-9)
            best[place] = trial._replace(share=1.0, error=bound)
    return sorted(best, key=lambda trial: trial.error)
