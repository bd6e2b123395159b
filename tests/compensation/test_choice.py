from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import add

import pytest
import torch
from torch import Tensor

from ckpt_prune.compensation import choice as choice_module
from ckpt_prune.compensation.choice import NEAR, RESOLUTION, FormChoice, choose_form, split_folds
from ckpt_prune.compensation.fit import Blend
from ckpt_prune.compensation.methods import METHODS
from tests.oracles import choice as oracle

from .sites import Site, fit_of, make_site

GRID = (0.0, 1e-3, 1e-1, 10.0)
SHARES = (0.0, 0.3, 1.0)
DIGITS = {name: 1e-7 if "rotation" in name else 1e-9 for name in METHODS}
"""A polar factor is found to 1e-8."""


@dataclass(frozen=True)
class Case:
    """A site whose residual stream has drifted, its tokens in folds of the sizes given."""

    site: Site
    drift: Tensor
    sizes: tuple[int, ...]

    @property
    def folds(self) -> list[Blend]:
        parts = zip(*(t.split(self.sizes) for t in (self.site.inputs, self.site.targets, self.drift)), strict=True)
        return [
            Blend(fit_of(x, y), d.T @ x, d.sum(0), float(d.square().sum()), float((d * y).sum())) for x, y, d in parts
        ]

    @property
    def undrifted(self) -> list[Blend]:
        return [Blend(fold.fit) for fold in self.folds]

    def oracle(self, method: str, value: float | None, share: float, *, relative: bool = True) -> float:
        parts = zip(*(t.split(self.sizes) for t in (self.site.inputs, self.site.targets, self.drift)), strict=True)
        tokens = [oracle.Tokens(*(t.numpy() for t in part)) for part in parts]
        W = self.site.weight_kept.numpy()
        return oracle.held_out_error(method, W, tokens, value or 0.0, share, relative=relative)

    def least_error(self, method: str) -> float:
        parts = zip(*(t.split(self.sizes) for t in (self.site.inputs, self.site.targets, self.drift)), strict=True)
        tokens = [oracle.Tokens(*(t.numpy() for t in part)) for part in parts]
        return oracle.least_error(method, self.site.weight_kept.numpy(), tokens)

    def choose(self, methods: Sequence[str] = tuple(METHODS), **options: Sequence[float] | str) -> FormChoice:
        return choose_form(self.site.weight_kept, self.folds, methods, **{"grid": GRID, "shares": SHARES, **options})


def make_case(d_out: int, d_in: int, k: int, sizes: Sequence[int], seed: int = 0, noise: float = 0.5) -> Case:
    """Drift that is partly linear in the inputs, has a mean, and is partly noise."""
    site = make_site(d_out, d_in, k, sum(sizes), seed)
    g = torch.Generator().manual_seed(seed + 1)
    linear, mean = (torch.randn(d_out, n, generator=g, dtype=torch.float64) for n in (d_in, 1))
    random = torch.randn(sum(sizes), d_out, generator=g, dtype=torch.float64)
    return Case(site, 0.3 * site.tokens @ linear.T + 0.5 * mean.T + noise * random, tuple(sizes))


def with_inputs(case: Case, tokens: Tensor) -> Case:
    return replace(case, site=replace(case.site, tokens=tokens))


def dead_inputs() -> Case:
    """One kept input is never active, one only in the first fold."""
    case = make_case(6, 14, 9, (20, 25, 18))
    never, once = case.site.kept[[2, 5]].tolist()
    tokens = case.site.tokens.clone()
    tokens[:, never] = 0
    tokens[20:, once] = 0
    return with_inputs(case, tokens)


def without_means() -> Case:
    case = make_case(6, 14, 9, (20, 25, 18))
    return with_inputs(
        replace(case, drift=case.drift - case.drift.mean(0)), case.site.tokens - case.site.tokens.mean(0)
    )


CASES = {
    "k<d_out": make_case(12, 10, 7, (30, 41, 25)),
    "k>d_out": make_case(6, 16, 11, (30, 41, 25)),
    "k=d_out": make_case(8, 12, 8, (30, 41, 25)),
    "k=1": make_case(5, 4, 1, (8, 9)),
    "fewer tokens than k": make_case(3, 16, 12, (2, 4, 3)),
    "folds of one token": make_case(4, 9, 6, (1, 30, 1, 9)),
    "dead inputs": dead_inputs(),
    "no means": without_means(),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", METHODS)
def test_every_trial_equals_refitting_on_tokens(name, case):
    for value in GRID if METHODS[name].uses_strength else [None]:
        for share in SHARES:
            (trial,) = case.choose([name], grid=[value or 0.0], shares=[share]).trials
            assert (trial.method, trial.strength, trial.share) == (name, value, share)
            assert trial.error == pytest.approx(case.oracle(name, value, share), rel=DIGITS[name])


@cache
def oracle_trials(label: str) -> dict[tuple[str, float | None, float], float]:
    return {
        (name, value, share): CASES[label].oracle(name, value, share)
        for name, method in METHODS.items()
        for value in (GRID if method.uses_strength else [None])
        for share in (SHARES if name != "none" else [0.0])
    }


@pytest.mark.parametrize("label", CASES)
def test_the_best_of_all_and_of_each_method(label):
    """Out of order and repeated: neither matters. What is ruled out could not have won, by every trial's error."""
    case, expected = CASES[label], oracle_trials(label)
    methods, grid, shares = ([*reversed(options), *options] for options in (METHODS, GRID, SHARES))
    chosen = case.choose(methods, grid=grid, shares=shares)
    ruled_out = {entry.method: entry.at_least for entry in chosen.ruled_out}
    assert [trial.method for trial in chosen.trials] == [name for name in METHODS if name not in ruled_out]
    assert list(ruled_out) == [name for name in METHODS if name in ruled_out]
    errors = dict(ruled_out)
    for trial in chosen.trials:
        errors[trial.method] = trial.error
        expected_error = expected[trial.method, trial.strength, trial.share]
        assert trial.error == pytest.approx(expected_error, rel=DIGITS[trial.method])
        least = min(error for (name, *_), error in expected.items() if name == trial.method)
        # Forms that are dear, and far behind at the ridges' share, are tried at no other.
        if not METHODS[trial.method].best_of_form or expected_error <= chosen.best.error * (1 + NEAR):
            assert expected_error == pytest.approx(least, rel=DIGITS[trial.method])
    for name, bound in ruled_out.items():
        assert METHODS[name].best_of_form
        assert bound == pytest.approx(case.least_error(name), rel=DIGITS[name])
        assert chosen.best.error < bound <= min(error for (method, *_), error in expected.items() if method == name)
    assert chosen.best in chosen.trials
    assert chosen.best.error == pytest.approx(min(expected.values()), rel=DIGITS[chosen.best.method])
    best, second = sorted(errors, key=lambda name: errors[name])[:2]
    assert (chosen.best.method, chosen.runner_up) == (best, second)
    assert chosen.margin == pytest.approx((errors[second] - errors[best]) / errors[best], rel=1e-6)
    assert chosen.margin > 1e-6
    assert chosen == case.choose()


def test_only_a_method_that_has_been_scored_rules_another_out():
    alone = CASES["k>d_out"].choose(["least-squares", "rotation"])
    assert [trial.method for trial in alone.trials] == ["rotation", "least-squares"]
    assert alone.ruled_out == ()


@pytest.mark.parametrize(("sizes", "two"), [((60, 61, 62, 63), False), ((61, 61, 61, 70), True), ((60, 190), True)])
def test_two_folds_are_held_out_where_tokens_are_plenty(sizes, two):
    """Eight training tokens for each of 24 kept inputs, whichever of the two is held out."""
    case = make_case(5, 30, 24, sizes)
    assert (oracle.held_out(sizes, 24) == [0, len(sizes) // 2]) == two
    chosen = case.choose(["none", "ridge"], grid=[0.1], shares=[0.3])
    for trial in chosen.trials:
        assert trial.error == pytest.approx(case.oracle(trial.method, trial.strength, 0.3), rel=1e-9)
    folds = case.folds
    assert len(list(split_folds(folds, reduce(add, folds), 24))) == (2 if two else len(sizes))


@pytest.mark.parametrize("name", METHODS)
def test_without_drift_there_is_one_target(name):
    case = make_case(6, 16, 11, (30, 41, 25))
    chosen = choose_form(case.site.weight_kept, case.undrifted, [name], [0.1], [0.3, 1.0])
    plain = replace(case, drift=torch.zeros_like(case.drift))
    assert chosen.best.share == 0.0
    assert chosen.best.error == pytest.approx(plain.oracle(name, 0.1, 0.0), rel=DIGITS[name])
    assert choose_form(case.site.weight_kept, case.undrifted, [name], [0.1]) == chosen


# ---- what is chosen -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", METHODS)
def test_equals_go_to_the_method_that_changes_least(first):
    """Nothing is dropped and nothing has drifted, so all are exact, but for what λ takes away in GRAIL."""
    case = make_case(6, 9, 9, (30, 41, 25))
    later = [name for name in reversed(METHODS) if list(METHODS).index(name) >= list(METHODS).index(first)]
    chosen = choose_form(case.site.weight_kept, case.undrifted, later, [0.0])
    assert (chosen.best.method, chosen.margin) == (first, 0.0)
    assert chosen.best.error < RESOLUTION
    assert (chosen.runner_up is None) == (first == "grail")


def test_equals_go_to_the_larger_strength_and_the_smaller_share():
    case = make_case(6, 9, 9, (30, 41, 25))
    case = replace(case, drift=torch.zeros_like(case.drift))
    for name in ("ridge", "affine"):
        best = case.choose([name], grid=[1.0, 5.0, 2.0], shares=[0.7, 0.2, 1.0]).best
        assert (best.strength, best.share) == (5.0, 0.2)
    assert case.choose(["rotation"], shares=[0.7, 0.2, 1.0]).best.share == 0.2


def test_rounding_does_not_choose(monkeypatch):
    """A method that is better by less than the resolution is no better."""
    case = CASES["k>d_out"]
    expected = {trial.method: trial.error for trial in case.choose(["ridge", "bias"]).trials}
    assert case.choose(["ridge", "bias"]).best.method == "ridge"
    monkeypatch.setattr(choice_module, "RESOLUTION", expected["bias"] - expected["ridge"] + 1e-9)
    chosen = case.choose(["ridge", "bias"])
    assert (chosen.best.method, chosen.margin, chosen.runner_up) == ("bias", 0.0, "ridge")


def test_the_margin_over_an_exact_fit_is_finite():
    case = make_case(6, 12, 6, (30, 41, 25))
    tokens = case.site.tokens.clone()
    tokens[:, case.site.dropped] = tokens[:, case.site.kept].flip(1)
    exact = with_inputs(case, tokens)
    chosen = choose_form(exact.site.weight_kept, exact.undrifted, ["bias", "ridge"], [0.0])
    assert chosen.best.method == "ridge"
    assert chosen.best.error < RESOLUTION
    assert chosen.margin == (chosen.trials[0].error - chosen.best.error) / RESOLUTION


@pytest.mark.parametrize("names", [list(METHODS), ["grail", "rotation-scale"]])
def test_a_target_without_energy_is_met(names):
    case = make_case(6, 14, 9, (20, 25, 18))
    silent = with_inputs(replace(case, drift=torch.zeros_like(case.drift)), torch.zeros_like(case.site.tokens))
    chosen = silent.choose(names)
    assert chosen.best.method == next(name for name in METHODS if name in names)
    assert {trial.error for trial in chosen.trials} == {0.0}
    assert chosen.margin == 0.0


def test_folds_without_tokens_are_left_out():
    case = CASES["k>d_out"]
    nothing = replace(case, site=replace(case.site, tokens=case.site.tokens[:0]), drift=case.drift[:0], sizes=(0,))
    folds = [nothing.folds[0], *case.folds, nothing.folds[0]]
    assert choose_form(case.site.weight_kept, folds, METHODS, GRID, SHARES) == case.choose()


def test_one_polar_factor_serves_both_rotations(monkeypatch):
    case, calls = CASES["k>d_out"], []
    rotation = METHODS["rotation"]
    counted = replace(rotation, form=lambda *a: calls.append(1) or rotation.form(*a))
    monkeypatch.setitem(choice_module.METHODS, "rotation", counted)
    alone = case.choose(["rotation"]).best
    assert len(calls) == len(case.sizes) * len(SHARES)
    both = case.choose(["rotation-scale", "rotation"]).trials[0]
    assert len(calls) == len(case.sizes) * len(SHARES)
    assert (both.method, both.share) == (alone.method, alone.share)
    assert both.error == pytest.approx(alone.error, rel=1e-12)


@pytest.mark.parametrize(("noise", "wins"), [(0.01, False), (3.0, True)])
def test_polar_factors_are_found_only_where_a_rotation_may_win(monkeypatch, noise, wins):
    """One tells whether it may; if so, one for each fold at the ridge's share and at those beside it."""
    case, calls = make_case(6, 24, 12, (7, 7, 7), noise=noise) if wins else CASES["k>d_out"], []
    scaled = METHODS["rotation-scale"]
    counted = replace(scaled, form=lambda *a: calls.append(1) or scaled.form(*a))
    monkeypatch.setitem(choice_module.METHODS, "rotation-scale", counted)
    chosen = case.choose(["rotation", "rotation-scale", "ridge"], shares=[0.0, 0.25, 0.5, 0.75, 1.0], grid=[1e-4, 1e-2])
    assert [trial.method for trial in chosen.trials] == (["rotation", "rotation-scale", "ridge"] if wins else ["ridge"])
    assert len(calls) == 1 if not wins else 1 < len(calls) < 1 + 3 * 5


def test_a_rotation_whose_scale_vanishes_is_fitted_itself():
    """A target that does not depend on the inputs: the best scale of any rotation is nothing."""
    x = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.float64)
    y = torch.ones(4, 2, dtype=torch.float64)
    weight = torch.eye(2, dtype=torch.float64)
    folds = [Blend(fit_of(x, y)), Blend(fit_of(x, y))]
    alone, scaled = (choose_form(weight, folds, [name], []).best.error for name in ("rotation", "rotation-scale"))
    errors = {
        trial.method: trial.error for trial in choose_form(weight, folds, ["rotation", "rotation-scale"], []).trials
    }
    assert errors == {"rotation": alone, "rotation-scale": scaled}
    assert (alone, scaled) == pytest.approx((1.5, 1.0))


# ---- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["ridge", "rigde"]}, "unknown method 'rigde': known are none, bias, "),
        ({"methods": []}, "at least one to try"),
        ({"methods": ["none", "ridge"], "grid": []}, "at least one value"),
        ({"grid": [1.0, -1.0]}, "zero or more"),
        ({"shares": []}, "one or more numbers from 0 to 1"),
        ({"shares": [0.5, 1.01]}, r"numbers from 0 to 1, not \[0.5, 1.01\]"),
        ({"shares": [-0.1]}, "numbers from 0 to 1"),
        ({"shares": [float("nan")]}, "numbers from 0 to 1"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        CASES["k>d_out"].choose(**options)


def test_folds_are_refused():
    case = CASES["k>d_out"]
    folds, weight = case.folds, case.site.weight_kept
    with pytest.raises(ValueError, match="at least 2 folds with tokens, not 1"):
        choose_form(weight, folds[:1], METHODS, GRID)
    with pytest.raises(ValueError, match="at least 2 folds with tokens, not 1"):
        choose_form(weight, [folds[0], folds[1] - folds[1]], METHODS, GRID)
    with pytest.raises(ValueError, match="some have none"):
        choose_form(weight, [folds[0], Blend(folds[1].fit)], METHODS, GRID)
    bare = [Blend(replace(fold.fit, gram=None, cross=None, target_energy=None)) for fold in folds]
    with pytest.raises(ValueError, match="second moments"):
        choose_form(weight, bare, ["none"], [])
