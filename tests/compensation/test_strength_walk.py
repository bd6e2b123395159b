"""Strengths by a few factors, against held-out errors of refits to tokens at every strength."""

import pytest
import torch

from ckpt_prune.compensation import choice as choice_module
from ckpt_prune.compensation import strength_walk
from ckpt_prune.compensation.methods import GRID, METHODS, SHARES
from ckpt_prune.compensation.strength_walk import OUTPUTS, RidgeErrors, mixture_of

from .test_choice import Case, make_case

RIDGES = [name for name, method in METHODS.items() if method.ridge_towards]
SPREAD = 0.01
"""Folds of the cases below differ by more than that in the error of the best fit."""


def steep(case: Case, decay: float) -> Case:
    """Inputs of which each varies less than the one before."""
    tokens = case.site.tokens * torch.logspace(0, -decay, case.site.tokens.shape[1], dtype=torch.float64)
    return Case(case.site.__class__(**{**vars(case.site), "tokens": tokens}), case.drift, case.sizes)


CASES = {
    "few tokens": make_case(2 * OUTPUTS + 44, 60, 45, (30, 25, 28, 31)),
    "many tokens": make_case(2 * OUTPUTS + 44, 30, 20, (200, 210, 190, 205), noise=3.0),
    "few outputs": make_case(40, 60, 45, (60, 70, 65)),
    "a steep spectrum": steep(make_case(2 * OUTPUTS + 44, 50, 40, (60, 61, 62), noise=2.0), 3.0),
    "hardly any noise": make_case(2 * OUTPUTS + 44, 40, 30, (90, 95, 92), noise=0.01),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", RIDGES)
def test_the_error_is_that_of_a_refit_and_next_to_the_least(name, case, monkeypatch):
    least = case.choose([name], grid=GRID, shares=SHARES).best
    monkeypatch.setattr(choice_module, "WIDE", 0)
    best = case.choose([name], grid=GRID, shares=SHARES).best
    assert best.error == pytest.approx(case.oracle(name, best.strength, best.share), rel=1e-9)
    assert best.error <= least.error * (1 + SPREAD)
    assert abs(GRID.index(best.strength) - GRID.index(least.strength)) <= 1


@pytest.mark.parametrize("name", RIDGES)
def test_few_strengths_are_tried(name, monkeypatch):
    monkeypatch.setattr(choice_module, "WIDE", 0)
    tried: list[tuple[int, float]] = []
    at = RidgeErrors.at

    def counted(self, strength, shares):
        tried.append((id(self), strength))
        return at(self, strength, shares)

    monkeypatch.setattr(RidgeErrors, "at", counted)
    case = CASES["few tokens"]
    case.choose([name], grid=GRID, shares=SHARES)
    assert len(tried) < len(case.folds) * len(GRID)


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
    whole = RidgeErrors.of(train, fold, alike.site.weight_kept, centred=False)
    eye = torch.eye(len(alike.site.weight_kept), dtype=torch.float64)
    asked = []
    solve = strength_walk.solve
    monkeypatch.setattr(strength_walk, "solve", lambda *a: (asked.append(a[0].dtype), solve(*a))[1])
    found = whole.mix(eye).at(1e-9, SHARES)
    assert asked == [torch.float64]
    torch.testing.assert_close(found, whole.at(1e-9, SHARES), rtol=1e-3, atol=0)
