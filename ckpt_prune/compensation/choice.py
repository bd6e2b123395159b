"""Which closed form, strength and share of the drift a projection gets: the best on held-out folds (this project).

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
from ckpt_prune.compensation.held_out import HeldOut
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
    squared_error: float


@dataclass(frozen=True)
class RuledOut:
    """A method that cannot win, since it does worse on the very tokens it is fitted to than another on unseen ones.

    Attributes:
        method: a name of `METHODS`.
        at_least: a lower bound of its held-out error, in the units of `Trial.error`. It is no held-out error itself.
    """

    method: str
    at_least: float


@dataclass(frozen=True)
class FormChoice:
    """The trial with the least held-out error, and how clear the choice is.

    Attributes:
        best: the trial that is chosen.
        margin: by how much `runner_up` is worse, relative to the error of `best`; by how much at least where it was
            ruled out. So no other method that was tried is nearer. 0 where no other was tried, or where the two errors
            differ by less than `RESOLUTION`. An error of `best` below `RESOLUTION` counts as `RESOLUTION`, so that the
            margin is finite.
        runner_up: the other method of least error, or of least bound where it was ruled out; None where no other was
            tried.
        trials: the best that was tried of each method that was not ruled out, in the order of `METHODS`.
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
    """The method, strength and share of the drift with the least held-out error, summed over folds.

    The error on a fold is that of a fit to all other folds. Every fit is scored by the target at α = 1, the dense
    model's own residual stream. Its share α only says how much of the training tokens' drift to believe. Without drift
    there is one target, and α is 0. With `PLENTY` training tokens for each kept input two folds are held out, else all.

    Of equal errors the one that changes the weights less wins: the method that stands first in `METHODS`, then the
    larger strength, then the smaller share.

    A method with `best_of_form` is ruled out where its error on the held-out folds is too large even when it is fitted
    to them as well, at α = 1. Only if it is not, its own held-out errors are computed: at the share at which the ridges
    are best, and where it is `NEAR` the best there or tokens are `FEW`, downhill from it. Without ridges all shares are
    tried.

    Args:
        weight_kept: W_K, (d_out, k) float64.
        folds: blends of disjoint tokens, with second moments, all with a drift or all without. Folds without a token
            are left out.
        methods: names of `METHODS` to choose among.
        grid: strengths to try, none negative. It may be empty if no method has a strength.
        shares: α to try, each in [0, 1].
        units: of the grid; relative strengths are relative to the training folds' Gram.
        total: the sum of `folds`, where the caller has it. Folds are asked for one by one and never kept, so that a
            sequence that makes them on demand holds one at a time: once, and again for methods that may win.

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
    if not grid and any(method.uses_strength for method in chosen):
        raise ValueError("choosing lambda needs at least one value to try")
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"shares of the drift must be one or more numbers from 0 to 1, not {list(shares)}")
    whole = _sum(folds) if total is None else total
    trials = _Trials(weight_kept, folds, whole, sorted(set(grid)), sorted(set(shares)), units)
    found, ruled_out = trials.run(chosen)
    best = _least(found)
    others = [trial for trial in found if trial.method != best.method]
    # Where a method was ruled out its error is not known, but it is no less than this.
    nearest = others + [FormTrial(each.method, None, 1.0, each.at_least) for each in ruled_out]
    if not nearest:
        return FormChoice(best, 0.0, None, tuple(found))
    runner_up = _least(nearest)
    gap = runner_up.error - best.error
    margin = gap / max(best.error, RESOLUTION) if gap > RESOLUTION else 0.0
    return FormChoice(best, margin, runner_up.method, tuple(found), tuple(ruled_out))


def _sum(folds: Sequence[Blend]) -> Blend:
    used = [fold for fold in folds if fold.fit.count > 0]
    if not used:
        raise ValueError(_too_few(0))
    return reduce(add, used)


def _too_few(used: int) -> str:
    return f"choosing on held-out tokens needs at least 2 folds with tokens, not {used}"


def _least(trials: Sequence[FormTrial]) -> FormTrial:
    """The trial with the least error. Of several equal ones it is the one that changes the weights least."""
    least = min(trial.error for trial in trials)
    order = list(METHODS)
    return min(
        (trial for trial in trials if trial.error <= least + RESOLUTION),
        key=lambda trial: (order.index(trial.method), -(trial.strength or 0.0), trial.share),
    )


def split_folds(folds: Sequence[Blend], total: Blend, kept: int) -> Iterator[tuple[Blend, Fit]]:
    """What is trained on and what is held out, at α = 1: every fold that has tokens, or two where tokens are plenty.

    The two are the first and the middle one. Folds are runs of one text: neighbours are most alike.

    Raises:
        ValueError: a single fold has tokens, or some have a drift and some have none.
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
        yield train, fold.at(1.0)
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

    def run(self, methods: Sequence[Method]) -> tuple[list[FormTrial], list[RuledOut]]:
        """The best trial of each method, and the methods that need none, in the order given."""
        shares = (0.0,) if self.total.cross is None else self.shares
        dear = [method.name for method in methods if method.best_of_form]
        sums: dict[_Key, float] = defaultdict(float)
        bounds: dict[str, float] = dict.fromkeys(dear, 0.0)
        compared = len(dear) < len(methods)
        bounding = dict(_fits(dear, self.weight_kept, self.total.at(1.0))) if compared else {}
        energy, fewest = 0.0, self.total.fit.count
        for train, fold in split_folds(self.folds, self.total, self.weight_kept.shape[1]):
            fewest = min(fewest, train.fit.count)
            energy += fold.second_moments()[2]
            for key, found in self._others([m for m in methods if not m.best_of_form], train, fold, shares):
                sums[key] += found
            for name, solution in bounding.items():
                bounds[name] += squared_error(solution, fold)
        unit = energy if energy > 0 else 1.0
        least = min(sums.values(), default=math.inf)
        ruled_out = {name for name, bound in bounds.items() if bound > least + RESOLUTION * unit}
        left = [name for name in dear if name not in ruled_out]
        few = fewest < FEW * self.weight_kept.shape[1]
        sums |= self._around(_share(sums, energy), left, shares, math.inf if few else least * (1 + NEAR))
        scale = 1 / energy if energy > 0 else 0.0
        trials = [FormTrial(*key, found * scale) for key, found in sums.items()]
        return (
            [_least([t for t in trials if t.method == m.name]) for m in methods if m.name not in ruled_out],
            [RuledOut(m.name, bounds[m.name] * scale) for m in methods if m.name in ruled_out],
        )

    def _others(
        self, methods: Sequence[Method], train: Blend, fold: Fit, shares: Sequence[float]
    ) -> Iterator[tuple[_Key, float]]:
        """Errors on one fold of methods that are not ruled out by a bound, each strength and share once."""
        strengths = [absolute_strength(value, self.units, train.fit) for value in self.grid]
        ridges = [method for method in methods if method.ridge_towards]
        for method, errors in _ridges(ridges, self.weight_kept, train, fold, strengths, shares):
            for (value, share), found in zip(product(self.grid, shares), errors, strict=True):
                yield (method.name, value, share), found
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
        """Errors over all folds of methods without a strength, at a share and, up to a limit, downhill from it.

        Without a share to start at, errors at every share.
        """
        sums: dict[_Key, float] = defaultdict(float)
        wanted = set(range(len(shares))) if start is None else {shares.index(start)}
        done: set[int] = set()
        while names and wanted - done:
            for train, fold in split_folds(self.folds, self.total, self.weight_kept.shape[1]):
                for index in sorted(wanted - done):
                    for name, solution in _fits(names, self.weight_kept, train.at(shares[index])):
                        sums[name, None, shares[index]] += squared_error(solution, fold)
            done |= wanted
            lowest = {name: min(done, key=lambda i: sums.get((name, None, shares[i]), math.inf)) for name in names}
            names = [name for name in names if sums[name, None, shares[lowest[name]]] <= limit]
            for name in names:
                wanted |= _beside(lowest[name], shares)
        return sums


def _share(sums: dict[_Key, float], energy: float) -> float | None:
    """The share at which the best ridge is best; None where there is none, or nothing to foretell."""
    own = [FormTrial(*key, found) for key, found in sums.items() if METHODS[key[0]].ridge_towards]
    return _least(own).share if own and energy > 0 else None


def _beside(index: int, values: Sequence[float]) -> set[int]:
    """An index and its neighbours."""
    return set(range(max(index - 1, 0), min(index + 2, len(values))))


def _ridges(
    methods: Sequence[Method],
    weight_kept: Tensor,
    train: Blend,
    fold: Fit,
    strengths: Sequence[float],
    shares: Sequence[float],
) -> Iterator[tuple[Method, list[float]]]:
    """Held-out errors of methods that are ridges: strength by strength, every share.

    These methods share one decomposition, which is let go at the end: at width 11008 it holds gigabytes. Those that
    add a bias have one of their own where no other is there, or where a strength is next to nothing.
    """
    held_out = None
    for centred in (False, True):
        own = [method for method in methods if method.adds_bias == centred]
        if not own:
            continue
        if held_out is not None and held_out.bears(strengths):
            held_out = held_out.centred(train)
        else:
            held_out = None
            held_out = HeldOut.of(train, fold, centred=centred)
        for method in own:
            base = weight_kept if method.ridge_towards == "kept" else None
            yield method, held_out.errors(base, strengths, shares).flatten().tolist()


def _fits(names: Sequence[str], weight_kept: Tensor, fit: Fit) -> Iterator[tuple[str, Solution]]:
    """The solution of each of some methods without a strength."""
    known: dict[str, Solution] = {}
    if {"rotation", "rotation-scale"} <= set(names):
        # Nearly all of the work is the polar factor, which both share.
        scaled = METHODS["rotation-scale"].fit(weight_kept, fit, 0.0)
        known["rotation-scale"], scale = scaled, scaled.details["scale"]
        if scale > SMALLEST_SCALE:
            known["rotation"] = Solution(scaled.weight / scale)
    for name in names:
        yield name, known.pop(name) if name in known else METHODS[name].fit(weight_kept, fit, 0.0)
