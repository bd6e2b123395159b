"""The choice on folds, for methods whose strength is no ridge's: each is scored by its own fit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt_prune.compensation.choice import choose_form
from ckpt_prune.compensation.fit import Blend, Fit, Solution
from ckpt_prune.compensation.methods import METHODS, Method
from tests.oracles import choice as oracle

from .sites import Site, fit_of, make_site

SIZES = (30, 41, 25)
GRID, SHARES = (0.01, 0.3, 20.0), (0.0, 0.5, 1.0)


def drift_of(site: Site) -> Tensor:
    g = torch.Generator().manual_seed(5)
    random = torch.randn(sum(SIZES), site.weight.shape[0], generator=g, dtype=torch.float64)
    return 0.4 * site.tokens @ torch.randn(site.weight.shape[1], site.weight.shape[0], generator=g).double() + random


SITE = make_site(6, 14, 9, sum(SIZES))
DRIFT = drift_of(SITE)


def blends() -> list[Blend]:
    parts = zip(*(t.split(SIZES) for t in (SITE.inputs, SITE.targets, DRIFT)), strict=True)
    return [Blend(fit_of(x, y), d.T @ x, d.sum(0), float(d.square().sum()), float((d * y).sum())) for x, y, d in parts]


# A form with a strength that is no ridge, from moments and from tokens.


def small_bias(weight_kept: Tensor, fit: Fit, strength: float) -> Solution:
    """The bias that restores the mean, less the more strength there is; the weights stay."""
    bias = fit.target_mean - weight_kept @ fit.mean
    return Solution(weight_kept, bias / (1 + strength / fit.count))


def small_bias_of_tokens(W: np.ndarray, X: np.ndarray, Y: np.ndarray, strength: float) -> tuple:
    return W, (Y - X @ W.T).mean(0) / (1 + strength / len(X))


@pytest.fixture
def form(monkeypatch) -> str:
    """The name of a method of another form, which the registry holds for this test."""
    name, original = "small-bias", oracle.fit_answer
    monkeypatch.setitem(METHODS, name, Method(name, "", "", True, True, True, form=small_bias))
    monkeypatch.setattr(
        oracle, "fit_answer", lambda method, *of: small_bias_of_tokens(*of) if method == name else original(method, *of)
    )
    return name


def brute(method: str, value: float, share: float, *, relative: bool = True) -> float:
    parts = zip(*(t.split(SIZES) for t in (SITE.inputs, SITE.targets, DRIFT)), strict=True)
    tokens = [oracle.Tokens(*(t.numpy() for t in part)) for part in parts]
    return oracle.held_out_error(method, SITE.weight_kept.numpy(), tokens, value, share, relative=relative)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("value", GRID)
def test_a_strength_of_another_form_is_scored_by_its_own_fit(form, value, share):
    (trial,) = choose_form(SITE.weight_kept, blends(), [form], [value], [share]).trials
    assert (trial.method, trial.strength, trial.share) == (form, value, share)
    assert trial.error == pytest.approx(brute(form, value, share), rel=1e-9)


def test_among_all_methods_every_reported_error_is_that_of_refitting(form):
    chosen = choose_form(SITE.weight_kept, blends(), list(METHODS), GRID, SHARES)
    ruled_out = [entry.method for entry in chosen.ruled_out]
    assert form not in ruled_out
    assert [trial.method for trial in chosen.trials] == [name for name in METHODS if name not in ruled_out]
    for trial in chosen.trials:
        expected = brute(trial.method, trial.strength or 0.0, trial.share)
        assert trial.error == pytest.approx(expected, rel=1e-7 if "rotation" in trial.method else 1e-9)
