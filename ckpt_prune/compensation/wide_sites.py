"""Choose and fit what is added to the kept weights of a wide projection: few factors, no eigenvectors.

All sums are of what the kept weights lack, y − W_K x (`fit.lack_from_moments`), so that a fit to them is the change of
the weights, Δ = Ŵ − W_K. See compensation/README.md, section 5.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import Tensor

from ckpt_prune.compensation.choice import (
    ENOUGH_FOR_TWO_FOLDS,
    FormChoice,
    FormTrial,
    RuledOut,
    candidates_of,
    fit_all,
    make_choice,
    split_folds,
)
from ckpt_prune.compensation.fit import Blend, Fit, Solution, complete, squared_error
from ckpt_prune.compensation.least_squares import shrink
from ckpt_prune.compensation.methods import Method, Units
from ckpt_prune.compensation.strength_walk import StrengthWalk

WIDE = 1024
"""A projection that keeps more inputs than this is wide, whatever the tokens."""
WIDE_IF_MANY_TOKENS = 512
"""One that keeps more than this is, if two folds are enough to choose on: eigenvectors take three times as long."""
NEAR_ON_ONE_FOLD = 0.02
"""A method without a strength that is so much worse than the best on the first fold is not scored on the others."""

_Key = tuple[str, float | None, float]


def is_wide(kept: int, tokens: int) -> bool:
    """Return True if a projection that keeps so many inputs is fitted here, to so many tokens."""
    return kept > WIDE or (kept > WIDE_IF_MANY_TOKENS and tokens >= ENOUGH_FOR_TWO_FOLDS * kept)


def fit_change(method: Method, weight_kept: Tensor, lack: Fit, strength: float) -> Solution:
    """Return Δ = Ŵ − W_K, (d_out, k) float64, and the bias of a method, from the sums of y − W_K x.

    `strength` is absolute; methods without one ignore it.
    """
    if method.ridge_towards == "kept":
        change = shrink(None, lack.centre() if method.adds_bias else lack, strength)
        return Solution(change, lack.target_mean - change @ lack.mean if method.adds_bias else None)
    if not method.needs_gram:
        return method.fit(weight_kept.new_zeros(weight_kept.shape), lack, strength)
    solution = method.fit(weight_kept, complete(lack, weight_kept), strength)
    return Solution(solution.weight - weight_kept, solution.bias)


def choose_wide(
    weight_kept: Tensor,
    folds: Sequence[Blend],
    methods: Sequence[str],
    grid: Sequence[float],
    shares: Sequence[float] = (0.0,),
    units: Units = "relative",
    *,
    total: Blend,
    energies: Sequence[float],
) -> FormChoice:
    """Choose the method, strength and share of the drift with the least held-out error, as `choice.choose_form` does.

    Two folds are held out, whatever the number of tokens. The strength of a ridge is found by `StrengthWalk`, whose
    errors are those of mixtures of the outputs. Methods that are no ridges, but need a Gram, are scored at the share
    that the ridges have on the first fold, or the largest if there are none. They are scored on the other fold too, if
    they are near the best on the first; products with Grams are in float32 for that above `WIDE_IF_MANY_TOKENS`
    inputs. `RuledOut.at_least` of the others is what the first fold says, not a bound.

    Args:
        weight_kept: W_K, (d_out, k) float64.
        folds: of disjoint tokens, of what W_K x lacks; they are read one by one.
        total: their sum.
        energies: Σ ‖y‖² of each fold, at α = 1.
    """
    candidates = candidates_of(methods, grid, shares)
    used_shares = (0.0,) if total.cross is None else tuple(sorted(set(shares)))
    walks = [
        StrengthWalk(
            method, None if method.ridge_towards == "kept" else -weight_kept, sorted(set(grid)), used_shares, units
        )
        for method in candidates
        if method.ridge_towards
    ]
    plain = [method for method in candidates if not method.ridge_towards and not method.needs_gram]
    costly = [method for method in candidates if not method.ridge_towards and method.needs_gram]
    sums: dict[_Key, float] = defaultdict(float)
    far: dict[str, float] = {}  # method that is not near the best on the first fold → times its error there
    energy, count, least_on_first, share = 0.0, 0, 0.0, used_shares[-1]
    for number, train, fold in split_folds(folds, total):
        energy += energies[number]
        for walk in walks:
            walk.see(count, train, fold)
        for key, error in _plain_errors(plain, weight_kept, train, fold, used_shares):
            sums[key] += error
        if count == 0 and walks:
            least_on_first, share = min(walk.least_of(0) for walk in walks)
            least_on_first = min([least_on_first, *sums.values()])
        near = [method.name for method in costly if method.name not in far]
        for name, error in _costly_errors(near, weight_kept, train.at(share) if near else None, fold):
            if count == 0 and walks and error > (1 + NEAR_ON_ONE_FOLD) * least_on_first:
                far[name] = error / least_on_first if least_on_first > 0 else 1.0
            else:
                sums[name, None, share] += error
        count += 1
    _finish_walks(walks, folds, total, count)
    for walk in walks:
        sums |= walk.errors()
    scale = 1 / energy if energy > 0 else 0.0
    trials = [FormTrial(*key, error * scale) for key, error in sums.items()]
    least = min(trial.error for trial in trials)
    ruled_out = [RuledOut(name, least * worse) for name, worse in far.items()]
    return make_choice([method for method in candidates if method.name not in far], trials, ruled_out)


def _plain_errors(
    methods: Sequence[Method], weight_kept: Tensor, train: Blend, fold: Fit, shares: Sequence[float]
) -> Iterator[tuple[_Key, float]]:
    """Yield errors on one fold of methods that need no Gram; without a bias they are the same at every share."""
    for method in methods:
        for share in shares if method.adds_bias else shares[:1]:
            solution = fit_change(method, weight_kept, train.at(share), 0.0)
            yield (method.name, None, share), squared_error(solution, fold)


def _costly_errors(
    names: Sequence[str], weight_kept: Tensor, lack: Fit | None, fold: Fit
) -> Iterator[tuple[str, float]]:
    """Yield errors on one fold of methods that are no ridges and need a Gram; `lack` is what they are fitted to."""
    if lack is None:
        return
    single = weight_kept.shape[1] > WIDE_IF_MANY_TOKENS
    for name, solution in fit_all(names, weight_kept, complete(lack, weight_kept, single=single)):
        yield name, squared_error(Solution(solution.weight - weight_kept, solution.bias), fold, single=single)


def _finish_walks(walks: Sequence[StrengthWalk], folds: Sequence[Blend], total: Blend, count: int) -> None:
    """Let walks that have seen `count` folds once see them again, until none has a strength left to try."""
    going_on = [walk for walk in walks if walk.move(count)]
    while going_on:
        for number, (_, train, fold) in enumerate(split_folds(folds, total)):
            for walk in going_on:
                walk.see(number, train, fold)
        going_on = [walk for walk in going_on if walk.move(count)]
