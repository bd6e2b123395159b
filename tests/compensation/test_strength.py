from functools import reduce
from operator import add

import pytest
import torch

from ckpt_prune.compensation.fit import error, from_moments
from ckpt_prune.compensation.methods import METHODS, absolute_lambda
from ckpt_prune.compensation.strength import choose_lambda

from .sites import WIDE, Site, make_site

GRID = (1e-6, 1e-3, 1e-1, 1.0, 1e2, 1e6)


def folds_of(site: Site, count: int = 4) -> list:
    parts = site.tokens.tensor_split(count)
    return [from_moments(site.weight, Site(site.weight, part, site.kept).moments, site.kept) for part in parts]


def refitted(method, weight_kept, folds, value, units):
    total, held_out = reduce(add, folds), 0.0
    for i, fold in enumerate(folds):
        train = reduce(add, [f for j, f in enumerate(folds) if j != i])
        held_out += error(method.fit(weight_kept, train, absolute_lambda(value, units, train)), fold)
    return held_out / total.target_energy


@pytest.mark.parametrize("units", ["relative", "absolute"])
@pytest.mark.parametrize("tokens", [200, 30, 12])
@pytest.mark.parametrize("name", ["ridge", "affine", "grail"])
def test_equals_refitting(name, tokens, units):
    site = make_site(*WIDE[:3], tokens)
    folds = folds_of(site)
    choice = choose_lambda(METHODS[name], site.weight_kept, folds, GRID, units)
    expected = {value: refitted(METHODS[name], site.weight_kept, folds, value, units) for value in GRID}
    assert list(choice.errors) == list(GRID)
    assert choice.errors == pytest.approx(expected, rel=1e-5)
    assert choice.value == min(expected, key=expected.get)


def test_lambda_zero_on_a_singular_gram_equals_refitting():
    site = make_site(6, 16, 11, 10)
    folds = folds_of(site, 2)
    choice = choose_lambda(METHODS["ridge"], site.weight_kept, folds, [0.0])
    assert choice.errors[0.0] == pytest.approx(
        refitted(METHODS["ridge"], site.weight_kept, folds, 0.0, "relative"), rel=1e-5
    )


def test_little_data_wants_more_lambda():
    few, many = (
        choose_lambda(METHODS["grail"], site.weight_kept, folds_of(site), GRID)
        for site in (make_site(6, 16, 4, tokens) for tokens in (8, 4000))
    )
    assert few.value > many.value


def test_ties_go_to_the_larger():
    """Nothing dropped: ridge is exact whatever λ."""
    site = make_site(6, 8, 8, 100)
    zero = type(site)(torch.zeros_like(site.weight), site.tokens, site.kept)
    assert choose_lambda(METHODS["ridge"], zero.weight_kept, folds_of(zero), [1.0, 5.0, 2.0]).value == 5.0


@pytest.mark.parametrize(
    ("name", "folds", "grid", "message"),
    [("ridge", 1, GRID, "2 folds"), ("ridge", 3, [], "one value"), ("rotation", 3, GRID, "no lambda")],
)
def test_refusals(name, folds, grid, message):
    site = make_site(*WIDE)
    with pytest.raises(ValueError, match=message):
        choose_lambda(METHODS[name], site.weight_kept, folds_of(site, folds), grid)


def test_negative_values_are_refused():
    site = make_site(*WIDE)
    with pytest.raises(ValueError, match="zero or more"):
        choose_lambda(METHODS["ridge"], site.weight_kept, folds_of(site), [1.0, -1.0])
