"""Which closed form, strength and share of the drift a projection gets: the best on held-out folds (this project).

No method is best everywhere. With few tokens a compensation rotation beats a refit, with many it does not, and
correcting the drift can do harm. The moments of a few folds give the error of every method on tokens that it was not
fitted to.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import add

from torch import Tensor

from ckpt_prune.compensation.fit import Blend, Fit, Solution, error
from ckpt_prune.compensation.held_out import HeldOut
from ckpt_prune.compensation.methods import METHODS, Method, Units, absolute_strength

RESOLUTION = 1e-12
"""Relative errors that differ by less than this count as equal: the difference is rounding."""
SMALLEST_SCALE = 1e-6
"""The scaled rotation is divided by its scale to get the plain one, unless the scale is smaller than this."""


@dataclass(frozen=True)
class Trial:
    """One way to fit a projection, and its error on tokens that it was not fitted to.

    Attributes:
        method: a name of `METHODS`.
        strength: in the units of the grid; None for methods without one.
        share: α of the target W x + α δ that the weights are fitted to.
        error: Σ held-out error / Σ energy of the held-out target, both at α = 1; 0 where that energy is 0.
    """

    method: str
    strength: float | None
    share: float
    error: float


@dataclass(frozen=True)
class Chosen:
    """The trial with the least held-out error, and how clear the choice is.

    Attributes:
        best: the trial that is chosen.
        margin: by how much `runner_up` is worse, relative to the error of `best`. 0 where no other method was tried,
            or where the two errors differ by less than `RESOLUTION`. An error of `best` below `RESOLUTION` counts as
            `RESOLUTION`, so that the margin is finite.
        runner_up: the best other method; None where no other was tried.
        trials: the best of each method, in the order of `METHODS`.
    """

    best: Trial
    margin: float
    runner_up: str | None
    trials: tuple[Trial, ...]


def choose(
    weight_kept: Tensor,
    folds: Sequence[Blend],
    methods: Sequence[str],
    grid: Sequence[float],
    shares: Sequence[float] = (0.0,),
    units: Units = "relative",
    *,
    total: Blend | None = None,
) -> Chosen:
    """The method, strength and share of the drift with the least held-out error, summed over folds.

    The error on a fold is that of a fit to all other folds. Every fit is scored by the target at α = 1, the dense
    model's own residual stream. Its share α only says how much of the training tokens' drift to believe. Without drift
    there is one target, and α is 0.

    Of equal errors the one that changes the weights less wins: the method that stands first in `METHODS`, then the
    larger strength, then the smaller share.

    Args:
        weight_kept: W_K, (d_out, k) float64.
        folds: blends of disjoint tokens, with second moments, all with a drift or all without. Folds without a token
            are left out.
        methods: names of `METHODS` to choose among.
        grid: strengths to try, none negative. It may be empty if no method has a strength.
        shares: α to try, each in [0, 1].
        units: of the grid; relative strengths are relative to the training folds' Gram.
        total: the sum of `folds`, where the caller has it. Each fold is asked for three times at most and never kept,
            so that a sequence that makes folds on demand holds one at a time.

    Raises:
        ValueError: no method or an unknown one, fewer than two folds with tokens, an empty grid that a method needs, a
            negative strength, no share or one outside [0, 1], drift in some folds only, or a fold without second
            moments.
    """
    strange = [name for name in methods if name not in METHODS]
    if strange:
        raise ValueError(f"unknown method {strange[0]!r}: known are {', '.join(METHODS)}")
    chosen = [method for name, method in METHODS.items() if name in methods]
    if not chosen:
        raise ValueError("choosing a method needs at least one to try")
    facts = [(fold.fit.count, fold.cross is not None) for fold in folds]
    used = [index for index, (count, _) in enumerate(facts) if count > 0]
    if len(used) < 2:
        raise ValueError(f"choosing on held-out tokens needs at least 2 folds with tokens, not {len(used)}")
    if not grid and any(method.uses_strength for method in chosen):
        raise ValueError("choosing lambda needs at least one value to try")
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"shares of the drift must be one or more numbers from 0 to 1, not {list(shares)}")
    if len({facts[index][1] for index in used}) > 1:
        raise ValueError("some folds have a drift and some have none: measure all of them to the same target")
    if not facts[used[0]][1]:
        shares = (0.0,)
    whole = reduce(add, (folds[index] for index in used)) if total is None else total
    every = _trials(weight_kept, whole, (folds[index] for index in used), chosen, grid, shares, units)
    trials = [_least([trial for trial in every if trial.method == method.name]) for method in chosen]
    best = _least(trials)
    others = [trial for trial in trials if trial.method != best.method]
    if not others:
        return Chosen(best, 0.0, None, tuple(trials))
    runner_up = _least(others)
    gap = runner_up.error - best.error
    margin = gap / max(best.error, RESOLUTION) if gap > RESOLUTION else 0.0
    return Chosen(best, margin, runner_up.method, tuple(trials))


def _least(trials: Sequence[Trial]) -> Trial:
    """The trial with the least error. Of several equal ones it is the one that changes the weights least."""
    least = min(trial.error for trial in trials)
    order = list(METHODS)
    return min(
        (trial for trial in trials if trial.error <= least + RESOLUTION),
        key=lambda trial: (order.index(trial.method), -(trial.strength or 0.0), trial.share),
    )


def _trials(
    weight_kept: Tensor,
    total: Blend,
    folds: Iterable[Blend],
    methods: Sequence[Method],
    grid: Sequence[float],
    shares: Sequence[float],
    units: Units,
) -> list[Trial]:
    """Every trial, each strength and share once."""
    grid, shares = sorted(set(grid)), sorted(set(shares))
    fixed = [method.name for method in methods if not method.uses_strength]
    fitted = [name for name in fixed if name != "none"]
    others = [method for method in methods if method.uses_strength and method.ridge_towards is None]
    sums: dict[tuple[str, float | None, float], float] = defaultdict(float)
    energy = 0.0
    for each in folds:
        train, fold = total - each, each.at(1.0)
        energy += fold.second_moments()[2]
        strengths = [absolute_strength(value, units, train.fit) for value in grid]
        for centred in (False, True):
            ridges = [method for method in methods if method.ridge_towards and method.adds_bias == centred]
            for method, errors in _ridges(ridges, weight_kept, train, fold, strengths, shares):
                for (value, share), found in zip(product(grid, shares), errors, strict=True):
                    sums[method.name, value, share] += found
        for method in others:
            for (value, strength), share in product(zip(grid, strengths, strict=True), shares):
                solution = method.fit(weight_kept, train.at(share), strength)
                sums[method.name, value, share] += error(solution, fold)
        if "none" in fixed:
            sums["none", None, shares[0]] += error(Solution(weight_kept), fold)
        for share in shares if fitted else []:
            for name, result in _fits(fitted, weight_kept, train.at(share)):
                sums[name, None, share] += error(result, fold)
    return [Trial(*key, found / energy if energy > 0 else 0.0) for key, found in sums.items()]


def _ridges(
    methods: Sequence[Method],
    weight_kept: Tensor,
    train: Blend,
    fold: Fit,
    strengths: Sequence[float],
    shares: Sequence[float],
) -> Iterator[tuple[Method, list[float]]]:
    """Held-out errors of methods that are ridges, all of them centred or none: strength by strength, every share.

    These methods share one decomposition, which is let go at the end: at width 11008 it holds gigabytes.
    """
    if not methods:
        return
    held_out = HeldOut.of(train, fold, centred=methods[0].adds_bias)
    for method in methods:
        base = weight_kept if method.ridge_towards == "kept" else None
        yield method, held_out.errors(base, strengths, shares).flatten().tolist()


def _fits(names: Sequence[str], weight_kept: Tensor, fit: Fit) -> Iterator[tuple[str, Solution]]:
    """The solution of each of the methods without a strength."""
    known: dict[str, Solution] = {}
    if {"rotation", "rotation-scale"} <= set(names):
        # Nearly all of the work is the polar factor, which both share.
        scaled = METHODS["rotation-scale"].fit(weight_kept, fit, 0.0)
        known["rotation-scale"], scale = scaled, scaled.details["scale"]
        if scale > SMALLEST_SCALE:
            known["rotation"] = Solution(scaled.weight / scale)
    for name in names:
        yield name, known.pop(name) if name in known else METHODS[name].fit(weight_kept, fit, 0.0)
