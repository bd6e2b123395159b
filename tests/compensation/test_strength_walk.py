"""Strengths by a few factors, against held-out errors of refits to tokens at every strength."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import pytest
import torch

from ckpt_prune.compensation import strength_walk, wide_sites
from ckpt_prune.compensation.choice import FormChoice, split_folds
from ckpt_prune.compensation.fit import Blend, Solution, lack_from_moments, squared_error
from ckpt_prune.compensation.methods import GRID, METHODS, SHARES, absolute_strength, derive_strength
from ckpt_prune.compensation.strength_walk import (
    OUTPUTS,
    RidgeErrors,
    StrengthWalk,
    loses_to_none,
    mixture_of,
    unseen_errors,
)
from ckpt_prune.compensation.wide_sites import choose_wide, fit_change, is_wide
from ckpt_prune.measure.moments.inputs import Drift

from .sites import fit_of
from .test_choice import CASES as EDGES
from .test_choice import Case, make_case

RIDGES = [name for name, method in METHODS.items() if method.ridge_towards]
SPREAD = 0.01
"""Folds of the cases below differ by more than that in the error of the best fit."""


def steep(case: Case, decay: float) -> Case:
    """Inputs of which each varies less than the one before."""
    tokens = case.site.tokens * torch.logspace(0, -decay, case.site.tokens.shape[1], dtype=torch.float64)
    return Case(case.site.__class__(**{**vars(case.site), "tokens": tokens}), case.drift, case.sizes)


# Two folds each: more would not be looked at.
CASES = {
    "few tokens": make_case(2 * OUTPUTS + 44, 60, 45, (55, 59)),
    "many tokens": make_case(2 * OUTPUTS + 44, 30, 20, (410, 395), noise=3.0),
    "few outputs": make_case(40, 60, 45, (95, 100)),
    "a steep spectrum": steep(make_case(2 * OUTPUTS + 44, 50, 40, (92, 91), noise=2.0), 3.0),
    "hardly any noise": make_case(2 * OUTPUTS + 44, 40, 30, (137, 140), noise=0.01),
}


def choose(
    case: Case, methods: Sequence[str], grid: Sequence[float] = GRID, shares: Sequence[float] = SHARES
) -> FormChoice:
    """By what the kept weights lack, as sites are chosen that are wide."""
    energies = [float(fold.at(1.0).target_energy) for fold in case.folds]
    folds = lacks(case)
    return choose_wide(case.site.weight_kept, folds, methods, grid, shares, total=reduce(add, folds), energies=energies)


def lacks(case: Case) -> list[Blend]:
    weight = case.site.weight_kept
    parts = zip(*(t.split(case.sizes) for t in (case.site.inputs, case.site.targets, case.drift)), strict=True)
    return [
        Blend(
            fit_of(x, y - x @ weight.T),
            d.T @ x,
            d.sum(0),
            float(d.square().sum()),
            float((d * (y - x @ weight.T)).sum()),
        )
        for x, y, d in parts
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", RIDGES)
def test_the_strength_is_next_to_the_best(name, case):
    least, best = case.choose([name], grid=GRID, shares=SHARES).best, choose(case, [name]).best
    true = case.oracle(name, best.strength, best.share)
    mixed = len(case.site.weight_kept) > 2 * OUTPUTS
    estimate = 0.1 if METHODS[name].ridge_towards == "zero" else 0.03  # the farther off the base, the less is exact
    assert best.error == pytest.approx(true, rel=estimate if mixed else 1e-9)
    assert true <= least.error * (1 + SPREAD)
    assert abs(GRID.index(best.strength) - GRID.index(least.strength)) <= 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_of_all_methods_one_is_chosen_that_is_about_the_best(case):
    """Methods that are no ridges are scored exactly, or on the first fold alone if they are far behind there."""
    best, least = choose(case, list(METHODS)).best, case.choose(list(METHODS), grid=GRID, shares=SHARES).best
    assert case.oracle(best.method, best.strength, best.share) <= least.error * (1 + 3 * SPREAD)
    (alone,) = choose(case, ["rotation"]).trials
    assert alone.error == pytest.approx(case.oracle("rotation", None, SHARES[-1]), rel=1e-6)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("case", [CASES["few tokens"], CASES["few outputs"], EDGES["k=1"]], ids=["many", "few", "one"])
@pytest.mark.parametrize("name", RIDGES)
def test_errors_on_held_out_folds_are_those_of_fits_to_the_others(name, case, wide):
    weight, folds, method = case.site.weight_kept, case.folds, METHODS[name]
    expected: list[float] = []
    for fold, other in (folds, folds[::-1]):
        train, held_out = fold, other.at(1.0)
        if not expected or expected[0] >= 1:
            strength = absolute_strength(derive_strength(weight.shape[1], train.fit.count), "relative", train.fit)
            solution = method.fit(weight, train.at(0.5), strength)
            expected.append(squared_error(solution, held_out) / squared_error(Solution(weight), held_out))
    given = lacks(case) if wide else folds
    mixed = wide and len(weight) > 2 * OUTPUTS and name != "grail"
    actual = unseen_errors(method, weight, given, reduce(add, given), 0.5, wide=wide)
    assert actual == pytest.approx(expected, rel=0.03 if mixed else 1e-8)


def test_a_fit_to_what_no_other_token_shows_loses():
    """The second half's drift is the opposite of the first half's: fitted to both there is nothing to gain."""
    site = make_case(6, 16, 11, (200, 200)).site
    halves = [fit_of(site.inputs, site.targets + sign * 9 * site.tokens @ site.weight.T) for sign in (1, -1)]
    blends = [Blend(half) for half in halves]
    unseen = unseen_errors(METHODS["ridge"], site.weight_kept, blends, reduce(add, blends), 0.0, wide=False)
    assert len(unseen) == 2
    assert min(unseen) > 2
    assert loses_to_none(0.9, unseen)
    assert not loses_to_none(0.9, [])
    assert not loses_to_none(0.1, [1.4])  # as of one window for as many inputs, where fits to two win


def test_nothing_is_held_out_where_one_fold_has_all_tokens():
    (fold,) = make_case(6, 16, 11, (30,)).folds
    empty = fold - fold
    assert (
        unseen_errors(
            METHODS["ridge"], make_case(6, 16, 11, (30,)).site.weight_kept, [fold, empty], fold, 0.0, wide=False
        )
        == []
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_change_of_weights_is_that_of_the_method(name):
    case = CASES["many tokens"]
    weight, (train, *_), (lack, *_) = case.site.weight_kept, case.folds, lacks(case)
    for share in (0.0, 0.5):
        expected = METHODS[name].fit(weight, train.at(share), 3.0)
        change = fit_change(METHODS[name], weight, lack.at(share), 3.0)
        torch.testing.assert_close(weight + change.weight, expected.weight, rtol=1e-7, atol=1e-9)
        assert (change.bias is None) == (expected.bias is None)
        if expected.bias is not None:
            torch.testing.assert_close(change.bias, expected.bias, rtol=1e-7, atol=1e-8)
        error = squared_error(change, lack.at(1.0))
        assert error == pytest.approx(squared_error(expected, train.at(1.0)), rel=1e-8)


@pytest.mark.parametrize("case", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("name", METHODS)
def test_every_trial_equals_refitting_on_tokens(name, case, monkeypatch):
    """One input, folds of one token, inputs that are zero: as narrow sites are chosen, if all folds are held out."""
    monkeypatch.setattr(wide_sites, "split_folds", lambda folds, total: split_folds(folds, total, 10**9))
    for value in (1e-3, 10.0) if METHODS[name].uses_strength else (None,):
        for share in (0.0, 0.3, 1.0):
            (trial,) = choose(case, [name], [value or 0.0], [share]).trials
            assert (trial.method, trial.strength, trial.share) == (name, value, share)
            assert trial.error == pytest.approx(case.oracle(name, value, share), rel=1e-7)


@pytest.mark.parametrize("name", RIDGES)
def test_few_strengths_are_tried(name, monkeypatch):
    """Three on the first fold, walk aside, and two on the other. All outputs take a factor that is known.

    45 inputs are fitted to 59 tokens: 1.5 times that ratio is next to 1.
    """
    tried: list[list[float]] = []
    last: list[RidgeErrors] = []
    factor = RidgeErrors.factor

    def count_factors(self, strength):
        if not last or last[-1] is not self:
            last.append(self)
            tried.append([])
        tried[-1].append(strength)
        return factor(self, strength)

    monkeypatch.setattr(RidgeErrors, "factor", count_factors)
    case = CASES["few tokens"]
    best = choose(case, [name]).best
    first, second = tried
    assert len(first) == len(set(first)) <= 3 + abs(GRID.index(best.strength) - GRID.index(1.0))
    assert len(second) == 2


@pytest.mark.parametrize("name", RIDGES)
def test_folds_are_gone_through_again_if_the_sum_is_least_at_the_neighbour(name):
    """The first fold is made to prefer another strength than the sum of both does."""
    case = CASES["few tokens"]
    folds, total = lacks(case), reduce(add, lacks(case))
    base = None if METHODS[name].ridge_towards == "kept" else -case.site.weight_kept
    walk = StrengthWalk(METHODS[name], base, GRID, SHARES, "relative")
    splits = [(train, fold) for _, train, fold in split_folds(folds, total)]
    for number, split in enumerate(splits):
        walk.see(number, *split)
    assert walk.best is not None
    best, other = walk._two_best()
    beyond = 2 * other - best
    walk.scored[other][1] = walk.scored[best][1] - 2 * (walk.scored[other][0] - walk.scored[best][0]).abs().max()
    assert walk.move(2)
    assert walk.best == other
    for number, split in enumerate(splits):
        walk.see(number, *split)
    assert set(walk.scored[beyond]) >= {0}
    assert all(len(walk.scored[index]) == 2 for index in walk._two_best())


def test_mixtures_keep_sums_of_squares_on_average():
    mixture = mixture_of(5 * OUTPUTS)
    torch.testing.assert_close(mixture @ mixture.T, 5.0 * torch.eye(OUTPUTS, dtype=torch.float64))
    assert mixture_of(2 * OUTPUTS) is None


def test_a_gram_that_float32_cannot_factor_is_factored_in_float64(monkeypatch):
    """Two inputs are all but the same: without digits to spare float32 would give any weights at all."""
    case = make_case(2 * OUTPUTS + 1, 12, 9, (40, 41))
    tokens = case.site.tokens.clone()
    kept = case.site.kept
    tokens[:, kept[1]] = tokens[:, kept[0]] + 1e-6 * tokens[:, kept[1]]
    alike = Case(case.site.__class__(**{**vars(case.site), "tokens": tokens}), case.drift, case.sizes)
    train, fold = alike.folds[0], alike.folds[1].at(1.0)
    errors = RidgeErrors.of(train, fold, alike.site.weight_kept, centred=False)
    eye = torch.eye(len(alike.site.weight_kept), dtype=torch.float64)
    dtypes = []
    solve = strength_walk.solve
    monkeypatch.setattr(strength_walk, "solve", lambda *a: (dtypes.append(a[0].dtype), solve(*a))[1])
    mixed = errors.mix(eye).at(1e-9, SHARES)
    assert dtypes == [torch.float64]
    torch.testing.assert_close(mixed, errors.at(1e-9, SHARES), rtol=1e-3, atol=0)


@pytest.mark.parametrize("centred", [False, True])
def test_errors_at_one_share_are_those_of_all_shares_there(centred):
    case = CASES["many tokens"]
    train, fold = case.folds[0], case.folds[1].at(1.0)
    assert train.cross is not None
    errors = RidgeErrors.of(train, fold, case.site.weight_kept, centred=centred)
    together = errors.at(2.0, SHARES)
    for index, share in enumerate(SHARES):
        torch.testing.assert_close(errors.towards(share).at(2.0, [share]), together[index : index + 1])


def test_what_is_lacking_is_summed_from_moments_of_all_inputs():
    """Against the tokens themselves, with a drift of them."""
    site = CASES["many tokens"].site
    delta = CASES["many tokens"].drift
    drift = Drift(delta.T @ site.tokens, delta.sum(0), float(delta.square().sum()))
    summed = lack_from_moments(site.weight, replace(site.moments, drift=drift), site.kept)
    for share in (0.0, 0.5, 1.0):
        lack = site.targets + share * delta - site.inputs @ site.weight_kept.T
        expected, computed = fit_of(site.inputs, lack), summed.at(share)
        for name in ("sum", "target_sum", "gram", "cross"):
            torch.testing.assert_close(getattr(computed, name), getattr(expected, name), rtol=1e-9, atol=1e-8)
        assert computed.target_energy == pytest.approx(expected.target_energy)


def test_what_is_wide():
    """More than 1,024 kept inputs, or more than 512 with tokens enough for two folds."""
    assert is_wide(1025, 1)
    assert is_wide(513, 8 * 513)
    assert not is_wide(513, 8 * 513 - 1)
    assert not is_wide(512, 10**6)
