"""Choose the closed form, strength and share of the drift of a projection on held-out folds (this project).

No method is best everywhere. With few tokens a compensation rotation beats a refit, with many it does not, and
correcting the drift can do harm. The moments of a few folds give the error of every method on tokens that it was not
fitted to.

See compensation/README.md, section 5.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import add

from torch import Tensor

from ckpt_prune.compensation.fit import Blend, Fit, Solution, squared_error
from ckpt_prune.compensation.held_out import FoldScore
from ckpt_prune.compensation.methods import METHODS, Method, Units, absolute_strength

RESOLUTION = 1e-12
"""Relative errors that differ by less than this count as equal: the difference is rounding."""
SMALLEST_SCALE = 1e-6
"""The scaled rotation is divided by its scale to get the plain one, unless the scale is smaller than this."""
ENOUGH_FOR_TWO_FOLDS = 8
"""With so many training tokens for each kept input, two folds held out choose as well as all."""
NEAR = 0.1
"""A rotation that is so much worse than the best, at the ridges' share of the drift, is tried at no other share."""
FEW = 2
"""With fewer training tokens for each kept input the best shares of ridges and rotations lie too far apart for that."""

_Key = tuple[str, float | None, float]
"""Method, strength in the units of the grid, and share."""


@dataclass(frozen=True)
class FormTrial:
    """One way to fit a projection, by its name in `METHODS`, and its error on tokens that it was not fitted to.

    Attributes:
        strength: in the units of the grid; None for methods without one.
        share: α of the target W x + α δ that the weights are fitted to.
        error: Σ held-out error / Σ energy of the held-out target, both at α = 1; 0 where that energy is 0.
    """

    method: str
    strength: float | None
    share: float
    error: float


@dataclass(frozen=True)
class RuledOut:
    """A method that cannot win: on the tokens it is fitted to, it does worse than another on unseen ones.

    Attributes:
        at_least: a lower bound of its held-out error, in the units of `FormTrial.error`; not that error itself. At wide
            sites, what one fold says that it is.
    """

    method: str
    at_least: float


@dataclass(frozen=True)
class FormChoice:
    """The trial with the least held-out error, and how clear the choice is.

    Attributes:
        margin: by how much `runner_up` is worse, relative to the error of `best`, or a lower bound if it was ruled out.
            0 if no other method was tried or the errors differ by less than `RESOLUTION`, which also is the least
            divisor.
        runner_up: the other method of least error, or of least bound if it was ruled out; None if no other was tried.
        trials: the best trial of each method that was not ruled out, in the order of `METHODS`.
        ruled_out: the other methods, in that order.
    """

    best: FormTrial
    margin: float
    runner_up: str | None
    trials: tuple[FormTrial, ...]
    ruled_out: tuple[RuledOut, ...] = ()


def choose_form(
    weight_kept: Tensor,
    folds: Sequence[Blend],
    methods: Sequence[str],
    grid: Sequence[float],
    shares: Sequence[float] = (0.0,),
    units: Units = "relative",
    *,
    total: Blend | None = None,
) -> FormChoice:
    """Choose the method, strength and share of the drift with the least held-out error, summed over folds.

    The error on a fold is that of a fit to all other folds. Every fit is scored by the target at α = 1, the dense
    model's own residual stream. Its share α only says how much of the training tokens' drift to believe. Without drift
    there is one target, and α is 0. With `ENOUGH_FOR_TWO_FOLDS` training tokens for each kept input two folds are held
    out, else all.

    If errors are equal, the one that changes the weights less wins: the method that stands first in `METHODS`, then
    the larger strength, then the smaller share.

    A method with `best_of_form` is ruled out if its error on the held-out folds is too large even when it is fitted to
    them as well, at α = 1. Otherwise its own held-out errors are computed: at the share at which the ridges are best,
    and downhill from it if it is `NEAR` the best there or tokens are `FEW`. Without ridges all shares are tried.

    Args:
        weight_kept: W_K, (d_out, k) float64.
        folds: blends of disjoint tokens, with second moments, all with a drift or all without. Folds without a token
            are left out.
        grid: strengths to try, none negative. It may be empty if no method has a strength.
        units: of the grid; relative strengths are relative to the training folds' Gram.
        total: the sum of `folds`, if the caller has it. Folds are read one by one and never kept, so a sequence that
            makes them on demand holds one at a time: once, and again for methods that may win.
    """
    candidates = candidates_of(methods, grid, shares)
    sum_of_folds = _sum(folds) if total is None else total
    trials = _Trials(weight_kept, folds, sum_of_folds, sorted(set(grid)), sorted(set(shares)), units)
    return make_choice(*trials.run(candidates))


def candidates_of(methods: Sequence[str], grid: Sequence[float], shares: Sequence[float]) -> list[Method]:
    """Return the methods with these names, in the order of `METHODS`; check arguments as `choose_form` takes them."""
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}: known are {', '.join(METHODS)}")
    candidates = [method for name, method in METHODS.items() if name in methods]
    if not candidates:
        raise ValueError("choosing a method needs at least one to try")
    if not grid and any(method.uses_strength for method in candidates):
        raise ValueError("choosing lambda needs at least one value to try")
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"shares of the drift must be one or more numbers from 0 to 1, not {list(shares)}")
    return candidates


def make_choice(
    methods: Sequence[Method], trials: Sequence[FormTrial], ruled_out: Sequence[RuledOut] = ()
) -> FormChoice:
    """Choose among all trials of some methods, and say how clear that is."""
    tried_trials = [_least([trial for trial in trials if trial.method == method.name]) for method in methods]
    best = _least(tried_trials)
    others = [trial for trial in tried_trials if trial.method != best.method]
    # Where a method was ruled out its error is not known, but it is no less than this.
    nearest = others + [FormTrial(method.method, None, 1.0, method.at_least) for method in ruled_out]
    if not nearest:
        return FormChoice(best, 0.0, None, tuple(tried_trials))
    runner_up = _least(nearest)
    gap = runner_up.error - best.error
    margin = gap / max(best.error, RESOLUTION) if gap > RESOLUTION else 0.0
    return FormChoice(best, margin, runner_up.method, tuple(tried_trials), tuple(ruled_out))


def _sum(folds: Sequence[Blend]) -> Blend:
    used = [fold for fold in folds if fold.fit.count > 0]
    if not used:
        raise ValueError(_too_few(0))
    return reduce(add, used)


def _too_few(used: int) -> str:
    return f"choosing on held-out tokens needs at least 2 folds with tokens, not {used}"


def _least(trials: Sequence[FormTrial]) -> FormTrial:
    """Return the trial with the least error; of several equal ones, the one that changes the weights least."""
    least = min(trial.error for trial in trials)
    order = list(METHODS)
    return min(
        (trial for trial in trials if trial.error <= least + RESOLUTION),
        key=lambda trial: (order.index(trial.method), -(trial.strength or 0.0), trial.share),
    )


def split_folds(folds: Sequence[Blend], total: Blend, kept: int = 0) -> Iterator[tuple[int, Blend, Fit]]:
    """Yield a fold's number, training and held-out tokens, at α = 1: every fold with tokens, or two if they are plenty.

    That is `ENOUGH_FOR_TWO_FOLDS` tokens for each of the `kept` inputs.

    The two are the first and the middle one. Folds are runs of one text: neighbours are most alike.
    """
    training: list[int] = []
    for index in dict.fromkeys([0, len(folds) // 2, *range(len(folds))]):
        fold = folds[index]
        if fold.fit.count == 0:
            continue
        train = total - fold
        if train.fit.count == 0:
            raise ValueError(_too_few(1))
        if (fold.cross is None) != (total.cross is None):
            raise ValueError("some folds have a drift and some have none: measure all of them to the same target")
        yield index, train, fold.at(1.0)
        training.append(train.fit.count)
        if len(training) == 2 and min(training) >= ENOUGH_FOR_TWO_FOLDS * kept:
            return


@dataclass(frozen=True)
class _Trials:
    """Held-out errors at one site; `grid` and `shares` ascend."""

    weight_kept: Tensor
    folds: Sequence[Blend]
    total: Blend
    grid: Sequence[float]
    shares: Sequence[float]
    units: Units

    def run(self, methods: Sequence[Method]) -> tuple[list[Method], list[FormTrial], list[RuledOut]]:
        """Return the methods that are not ruled out, all trials of these, and those that are, in the order given."""
        shares = (0.0,) if self.total.cross is None else self.shares
        bounded_names = [method.name for method in methods if method.best_of_form]
        sums: dict[_Key, float] = defaultdict(float)
        bounds: dict[str, float] = dict.fromkeys(bounded_names, 0.0)
        compared = len(bounded_names) < len(methods)
        bounding = dict(fit_all(bounded_names, self.weight_kept, self.total.at(1.0))) if compared else {}
        others = [method for method in methods if not method.best_of_form]
        energy, fewest = 0.0, self.total.fit.count
        for _, train, fold in split_folds(self.folds, self.total, self.weight_kept.shape[1]):
            fewest = min(fewest, train.fit.count)
            energy += fold.second_moments()[2]
            for key, fold_error in self._others(others, train, fold, shares):
                sums[key] += fold_error
            for name, solution in bounding.items():
                bounds[name] += squared_error(solution, fold)
        unit = energy if energy > 0 else 1.0
        least = min(sums.values(), default=math.inf)
        ruled_out = {name for name, bound in bounds.items() if bound > least + RESOLUTION * unit}
        open_names = [name for name in bounded_names if name not in ruled_out]
        few = fewest < FEW * self.weight_kept.shape[1]
        sums |= self._around(_share(sums, energy), open_names, shares, math.inf if few else least * (1 + NEAR))
        scale = 1 / energy if energy > 0 else 0.0
        return (
            [method for method in methods if method.name not in ruled_out],
            [FormTrial(*key, total_error * scale) for key, total_error in sums.items()],
            [RuledOut(m.name, bounds[m.name] * scale) for m in methods if m.name in ruled_out],
        )

    def _others(
        self, methods: Sequence[Method], train: Blend, fold: Fit, shares: Sequence[float]
    ) -> Iterator[tuple[_Key, float]]:
        """Yield errors on one fold of methods that are not ruled out by a bound, each strength and share once."""
        strengths = [absolute_strength(value, self.units, train.fit) for value in self.grid]
        ridges = [method for method in methods if method.ridge_towards]
        for method, errors in _ridges(ridges, self.weight_kept, train, fold, strengths, shares):
            for (value, share), fold_error in zip(product(self.grid, shares), errors, strict=True):
                yield (method.name, value, share), fold_error
        for method in methods:
            if method.ridge_towards is None and method.uses_strength:
                for (value, strength), share in product(zip(self.grid, strengths, strict=True), shares):
                    solution = method.fit(self.weight_kept, train.at(share), strength)
                    yield (method.name, value, share), squared_error(solution, fold)
            elif method.name == "none":
                yield ("none", None, shares[0]), squared_error(Solution(self.weight_kept), fold)
            elif not method.uses_strength:
                for share in shares:
                    solution = method.fit(self.weight_kept, train.at(share), 0.0)
                    yield (method.name, None, share), squared_error(solution, fold)

    def _around(
        self, start: float | None, names: Sequence[str], shares: Sequence[float], limit: float
    ) -> dict[_Key, float]:
        """Sum errors over all folds of methods without a strength, at a share and, up to a limit, downhill from it.

        Without a share to start at, try every share.
        """
        sums: dict[_Key, float] = defaultdict(float)
        indices = set(range(len(shares))) if start is None else {shares.index(start)}
        done_indices: set[int] = set()
        while names and indices - done_indices:
            for _, train, fold in split_folds(self.folds, self.total, self.weight_kept.shape[1]):
                for index in sorted(indices - done_indices):
                    for name, solution in fit_all(names, self.weight_kept, train.at(shares[index])):
                        sums[name, None, shares[index]] += squared_error(solution, fold)
            done_indices |= indices
            lowest = {
                name: min(done_indices, key=lambda i: sums.get((name, None, shares[i]), math.inf)) for name in names
            }
            names = [name for name in names if sums[name, None, shares[lowest[name]]] <= limit]
            for name in names:
                indices |= set(range(max(lowest[name] - 1, 0), min(lowest[name] + 2, len(shares))))
        return sums


def _share(sums: dict[_Key, float], energy: float) -> float | None:
    """Return the share at which the best ridge is best; None if there is no ridge, or no energy."""
    ridge_trials = [FormTrial(*key, total_error) for key, total_error in sums.items() if METHODS[key[0]].ridge_towards]
    return _least(ridge_trials).share if ridge_trials and energy > 0 else None


def _ridges(
    methods: Sequence[Method],
    weight_kept: Tensor,
    train: Blend,
    fold: Fit,
    strengths: Sequence[float],
    shares: Sequence[float],
) -> Iterator[tuple[Method, list[float]]]:
    """Yield held-out errors of methods that are ridges: strength by strength, every share.

    These methods share one decomposition, which is freed at the end: at width 11008 it holds gigabytes. Those that add
    a bias decompose anew if no other method is there, or a strength is next to nothing.
    """
    held_out = None
    for centred in (False, True):
        group = [method for method in methods if method.adds_bias == centred]
        if not group:
            continue
        if held_out is not None and held_out.can_add_bias(strengths):
            held_out = held_out.with_bias(train)
        else:
            held_out = None
            held_out = FoldScore.of(train, fold, centred=centred)
        for method in group:
            base = weight_kept if method.ridge_towards == "kept" else None
            yield method, held_out.errors(base, strengths, shares).flatten().tolist()


def fit_all(names: Sequence[str], weight_kept: Tensor, fit: Fit) -> Iterator[tuple[str, Solution]]:
    """Yield the solution of each of some methods without a strength."""
    solved: dict[str, Solution] = {}
    if {"rotation", "rotation-scale"} <= set(names):
        # Nearly all of the work is the polar factor, which both share.
        scaled = METHODS["rotation-scale"].fit(weight_kept, fit, 0.0)
        solved["rotation-scale"], scale = scaled, scaled.details["scale"]
        if scale > SMALLEST_SCALE:
            solved["rotation"] = Solution(scaled.weight / scale)
    for name in names:
        yield name, solved.pop(name) if name in solved else METHODS[name].fit(weight_kept, fit, 0.0)
