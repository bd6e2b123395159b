from dataclasses import asdict, replace

import pytest
from oracles import shift as oracle

from ckpt_prune.compensation.methods import METHODS
from ckpt_prune.compensation.shift import freedom, shift

from .sites import SHAPES, make_site


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_equals_the_proposition_from_tokens(shape, strength):
    site, other = make_site(*shape), make_site(*shape, seed=7)
    found = shift(site.weight, site.moments, other.moments, site.kept, strength)
    arrays = (site.weight.numpy(), site.tokens.numpy(), other.tokens.numpy())
    expected = oracle.terms(*arrays, site.kept.tolist(), strength)
    assert asdict(found) == pytest.approx(expected, rel=1e-6)
    assert found.bound == pytest.approx(2 * expected["floor"] + expected["sampling"] + expected["shifting"], rel=1e-6)


def test_on_its_own_tokens_nothing_is_shifted():
    site = make_site(4, 9, 6, 60)
    found = shift(site.weight, site.moments, site.moments, site.kept, 0.0)
    assert (found.covariances, found.means, found.shifting) == (0, 0, 0)
    assert found.sampling is not None
    assert found.bound == 2 * found.floor + found.sampling


def test_without_spectra_only_what_they_give_is_missing():
    site, other = make_site(4, 9, 6, 60), make_site(4, 9, 6, 60, seed=7)
    known = shift(site.weight, site.moments, other.moments, site.kept, 1.0)
    found = shift(site.weight, site.moments, other.moments, site.kept, 1.0, spectra=False)
    assert found == replace(known, covariances=None, smallest=None, sampling=None, shifting=None)
    assert found.bound is None


def test_a_singular_fit_has_no_bound():
    site = make_site(4, 9, 6, 60)
    site = replace(site, tokens=site.tokens.index_fill(1, site.kept[:1], 0.0))
    found = shift(site.weight, site.moments, site.moments, site.kept, 0.0)
    assert (found.smallest, found.sampling, found.bound) == (pytest.approx(0, abs=1e-12), float("inf"), float("inf"))


def test_grams_are_needed():
    site = make_site(4, 9, 6, 60)
    bare = replace(site.moments, gram=None)
    for pair in ((bare, site.moments), (site.moments, bare)):
        with pytest.raises(ValueError, match="Gram"):
            shift(site.weight, *pair, site.kept, 0.0)


def test_degrees_of_freedom():
    """Of a projection of 5 outputs and 3 kept inputs: a rotation of 5 axes has a number for each pair."""
    expected = {"none": 0, "bias": 5, "rotation": 10, "rotation-scale": 11, "centred-rotation": 15}
    expected |= {"least-squares": 25, "ridge": 15, "affine": 20, "grail": 15}
    assert {method: freedom(method, 5, 3) for method in METHODS} == expected
