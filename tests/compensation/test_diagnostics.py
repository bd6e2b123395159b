import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import closed_forms

from ckpt_prune.compensation.diagnostics import diagnose
from ckpt_prune.compensation.fit import squared_error
from ckpt_prune.compensation.methods import METHODS

from .sites import SHAPES, WIDE, Site, make_site


def oracle(site: Site) -> tuple[float, float, float]:
    arrays = (site.weight, site.tokens, site.kept, site.dropped)
    return closed_forms.schur_floor(*(t.numpy() for t in arrays))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_schur_complement(shape):
    site = make_site(*shape)
    diagnosis = diagnose(site.weight, site.moments, site.kept)
    assert (diagnosis.uncompensated, diagnosis.floor, diagnosis.rho2) == pytest.approx(oracle(site), rel=1e-8)
    assert 0 < diagnosis.rho2 < 1


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_the_floor_is_where_affine_ends(seed):
    site = make_site(4, 9, 6, 60, seed)
    diagnosis, fit = diagnose(site.weight, site.moments, site.kept), site.fit
    assert squared_error(METHODS["none"].fit(site.weight_kept, fit, 0), fit) / fit.count == pytest.approx(
        diagnosis.uncompensated
    )
    errors = [squared_error(METHODS["affine"].fit(site.weight_kept, fit, s), fit) / fit.count for s in (1e3, 1.0, 1e-9)]
    assert errors[0] >= errors[1] >= diagnosis.floor * (1 - 1e-9)
    assert errors[2] == pytest.approx(diagnosis.floor, rel=1e-6)


def test_nothing_dropped():
    site = make_site(6, 8, 8, 50)
    diagnosis = diagnose(site.weight, site.moments, site.kept)
    assert (diagnosis.uncompensated, diagnosis.floor, diagnosis.rho2) == (0.0, 0.0, 1.0)


def test_everything_dropped():
    site = make_site(6, 8, 0, 50)
    diagnosis = diagnose(site.weight, site.moments, site.kept)
    mean_energy = float(site.targets.square().sum(1).mean())
    assert diagnosis.uncompensated == pytest.approx(mean_energy)
    assert diagnosis.rho2 == 0.0
    assert diagnosis.floor == pytest.approx(float(site.targets.var(0, correction=0).sum()))


def test_copies_of_kept_inputs_cost_nothing_even_when_singular():
    site = make_site(6, 8, 8, 50)
    doubled = Site(torch.cat([site.weight, site.weight], 1), site.tokens.repeat(1, 2), torch.arange(10))
    diagnosis = diagnose(doubled.weight, doubled.moments, doubled.kept)
    assert diagnosis.uncompensated > 1
    assert diagnosis.floor < 1e-8 * diagnosis.uncompensated
    assert diagnosis.rho2 == pytest.approx(1.0)


def test_a_float32_gram_is_enough():
    site = make_site(*WIDE)
    rounded = dataclasses.replace(site.moments, gram=site.moments.gram.float())
    exact, diagnosis = (diagnose(site.weight, moments, site.kept) for moments in (site.moments, rounded))
    assert dataclasses.astuple(diagnosis) == pytest.approx(dataclasses.astuple(exact), rel=1e-4)


def test_without_a_gram():
    site = make_site(*WIDE)
    with pytest.raises(ValueError, match="second moments"):
        diagnose(site.weight, dataclasses.replace(site.moments, gram=None), site.kept)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_wide_covariances_are_not_taken_apart(shape, monkeypatch):
    """Tokens may be fewer than inputs: the pseudo-inverse's floor comes out a little too high, and never too low."""
    site = make_site(*shape)
    doubled = Site(
        torch.cat([site.weight, site.weight], 1), site.tokens.repeat(1, 2), torch.arange(len(site.tokens[0]))
    )
    for variant in (site, doubled):
        expected = diagnose(variant.weight, variant.moments, variant.kept)
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", None)
            diagnosis = diagnose(variant.weight, variant.moments, variant.kept, exact=0)
        assert diagnosis.uncompensated == expected.uncompensated
        assert diagnosis.floor == pytest.approx(expected.floor, rel=1e-6, abs=1e-6 * expected.uncompensated)
        assert diagnosis.rho2 == pytest.approx(expected.rho2, abs=1e-6)


@pytest.mark.parametrize("tokens", [40, 200, 2000])
def test_wide_covariances_that_were_rounded_are_damped_by_that(tokens, monkeypatch):
    """Fewer tokens than inputs in float32: rounding makes eigenvalues negative, which no factor bears."""
    site = make_site(20, 300, 240, tokens)
    expected = diagnose(site.weight, site.moments, site.kept)
    rounded = dataclasses.replace(site.moments, gram=site.moments.gram.float())
    monkeypatch.setattr(torch.linalg, "eigh", None)
    diagnosis = diagnose(site.weight, rounded, site.kept, exact=0)
    assert diagnosis.uncompensated == pytest.approx(expected.uncompensated, rel=1e-5)
    assert diagnosis.floor == pytest.approx(expected.floor, rel=1e-3, abs=1e-3 * expected.uncompensated)


def test_wide_inputs_that_stay_and_never_vary_predict_nothing():
    site = make_site(4, 12, 6, 30)
    still = Site(site.weight, torch.where(torch.arange(12) < 6, 1.0, site.tokens), torch.arange(6))
    diagnosis = diagnose(still.weight, still.moments, still.kept, exact=0)
    assert diagnosis.floor > 0
    assert diagnosis.rho2 == 0
