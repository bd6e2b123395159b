import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import closed_forms

from ckpt_prune.compensation import fit as fit_module
from ckpt_prune.compensation.fit import Fit, Solution, complete, fit_from_moments, squared_error

from .sites import SHAPES, WIDE, fit_of, make_site


def assert_same(a: Fit, b: Fit, rtol: float = 1e-10) -> None:
    assert a.count == b.count
    for name in ("sum", "target_sum", "gram", "cross"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=rtol, atol=rtol * 1e3)
    assert a.target_energy == pytest.approx(b.target_energy, rel=rtol)


@pytest.mark.parametrize("chunk", [2, 3, 1024])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_from_moments_equals_activations(shape, chunk, monkeypatch):
    monkeypatch.setattr(fit_module, "CHUNK", chunk)
    site = make_site(*shape)
    assert_same(site.fit, fit_of(site.inputs, site.targets))


def test_without_a_gram_only_vectors_are_known():
    site = make_site(*WIDE)
    fit = fit_from_moments(site.weight, dataclasses.replace(site.moments, gram=None), site.kept)
    assert (fit.gram, fit.cross, fit.target_energy) == (None, None, None)
    torch.testing.assert_close(fit.target_mean, site.targets.mean(0))
    torch.testing.assert_close(fit.mean, site.inputs.mean(0))
    assert (fit + site.fit).gram is None
    with pytest.raises(ValueError, match="second moments"):
        fit.centre()
    with pytest.raises(ValueError, match="second moments"):
        squared_error(Solution(site.weight_kept), fit)


def test_sums_add_and_subtract():
    site = make_site(*WIDE)
    x, y = site.inputs, site.targets
    first, second = fit_of(x[:70], y[:70]), fit_of(x[70:], y[70:])
    assert_same(first + second, fit_of(x, y))
    assert_same(site.fit - second, first)


def test_centred_equals_centred_activations():
    site = make_site(*WIDE)
    x, y = site.inputs - site.inputs.mean(0), site.targets - site.targets.mean(0)
    assert_same(site.fit.centre(), fit_of(x, y))


def test_shifted_equals_shifted_activations():
    site = make_site(*WIDE)
    origin, target_origin = torch.arange(11.0).double(), torch.arange(6.0).double()
    assert_same(
        site.fit.shift_origin(origin, target_origin), fit_of(site.inputs - origin, site.targets - target_origin)
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), k=st.integers(1, 9), with_bias=st.booleans())
def test_error_equals_the_measured_one(seed, k, with_bias):
    site = make_site(5, 9, k, 30, seed)
    g = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(5, k, generator=g, dtype=torch.float64)
    bias = torch.randn(5, generator=g, dtype=torch.float64) if with_bias else None
    measured = closed_forms.residual(
        site.inputs.numpy(), site.targets.numpy(), (weight.numpy(), 0 if bias is None else bias.numpy())
    )
    assert squared_error(Solution(weight, bias), site.fit) == pytest.approx(measured, rel=1e-9)


def test_products_in_float32_give_the_same_to_its_digits():
    """`complete` and `squared_error` return in float32 what they return in float64, to six digits or so."""
    site = make_site(40, 90, 60, 300)
    lack = fit_of(site.inputs, site.targets - site.inputs @ site.weight_kept.T)
    assert_same(complete(lack, site.weight_kept, single=True), site.fit, rtol=1e-5)
    solution = Solution(0.3 * site.weight_kept)
    exact = squared_error(solution, site.fit)
    fitted = solution.weight.numpy(), 0
    assert exact == pytest.approx(closed_forms.residual(site.inputs.numpy(), site.targets.numpy(), fitted))
    single = squared_error(solution, site.fit, single=True)
    assert single != exact
    assert single == pytest.approx(exact, rel=1e-5)
