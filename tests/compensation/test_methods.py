import dataclasses

import numpy as np
import pytest
import torch
from oracles import closed_forms

from ckpt_prune.compensation.fit import fit_from_moments, squared_error
from ckpt_prune.compensation.least_squares import shrink
from ckpt_prune.compensation.methods import METHODS, absolute_strength, derive_strength

from .sites import SHAPES, TALL, WIDE, make_site

LAMBDA = 3.7
WITH_LAMBDA = ("ridge", "affine", "grail")


def close(actual: torch.Tensor, expected: np.ndarray, rtol: float = 1e-8) -> None:
    expected = torch.from_numpy(np.ascontiguousarray(expected))
    assert (actual - expected).norm() <= rtol * expected.norm()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_equals_its_oracle(name, shape):
    method, site = METHODS[name], make_site(*shape)
    solution = method.fit(site.weight_kept, site.fit, LAMBDA)
    arguments = [t.numpy() for t in (site.weight_kept, site.inputs, site.targets)]
    oracle = getattr(closed_forms, name.replace("-", "_"))
    weight, bias = oracle(*arguments, *([LAMBDA] if method.uses_strength else []))
    close(solution.weight, weight)
    assert (solution.bias is not None) == method.adds_bias
    if solution.bias is not None:
        close(solution.bias, bias)
    assert squared_error(solution, site.fit) == pytest.approx(
        closed_forms.residual(*arguments[1:], (weight, bias)), rel=1e-7
    )


@pytest.mark.parametrize("shape", [TALL, WIDE], ids=["many tokens", "few tokens"])
def test_the_rule_s_strength_is_that_of_bayes_where_two_fifths_can_be_predicted(shape):
    """ρ² = k · change · mean square / (that + noise) = 0.4, and the prior's mean is W_K."""
    site = make_site(*shape)
    inputs, targets = site.inputs.numpy(), site.targets.numpy()
    tokens, kept = inputs.shape
    change, noise = 0.7, 1.5 * 0.7 * kept * np.mean(np.square(inputs))
    strength = absolute_strength(derive_strength(kept, tokens), "relative", site.fit)
    solution = METHODS["ridge"].fit(site.weight_kept, site.fit, strength)
    close(solution.weight, closed_forms.bayes(site.weight_kept.numpy(), inputs, targets, change, noise)[0])


def test_the_rule_s_strength_loses_little_on_other_tokens():
    """Made-up sites of which the kept inputs predict 20 to 60 %, at k / n from 0.05 to 1.6; the best of a fine grid."""
    rng, kept, lost = np.random.default_rng(0), 32, []
    for tokens in (20, 64, 640):
        for predicted in (0.2, 0.4, 0.6):
            for _ in range(8):
                change = rng.normal(size=(16, kept)) * np.sqrt(predicted / kept)
                inputs = rng.normal(size=(tokens, kept))
                targets = inputs @ change.T + np.sqrt(1 - predicted) * rng.normal(size=(tokens, 16))

                def error(
                    strength: float, inputs=inputs, targets=targets, change=change, noise=16 * (1 - predicted)
                ) -> float:
                    """Beside that of the noise: other tokens have inputs without correlations."""
                    absolute = strength * np.mean(np.sum(np.square(inputs), 0))
                    fitted = closed_forms.ridge(np.zeros_like(change), inputs, targets, absolute)[0]
                    return float(np.sum(np.square(fitted - change))) + noise

                best = min(map(error, np.geomspace(1e-3, 100, 41)))
                lost.append(error(derive_strength(kept, tokens)) / best - 1)
    assert np.mean(lost) < 0.02
    assert derive_strength(10, 10**9) == 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_needs_a_gram_exactly_if_it_says_so(name):
    site, method = make_site(*WIDE), METHODS[name]
    fit = fit_from_moments(site.weight, dataclasses.replace(site.moments, gram=None), site.kept)
    if method.needs_gram:
        with pytest.raises(ValueError, match="second moments"):
            method.fit(site.weight_kept, fit, 1.0)
    else:
        expected = method.fit(site.weight_kept, site.fit, 1.0)
        actual = method.fit(site.weight_kept, fit, 1.0)
        assert torch.equal(actual.weight, expected.weight)
        if method.adds_bias:
            torch.testing.assert_close(actual.bias, expected.bias)


@pytest.mark.parametrize("name", METHODS)
def test_uses_strength_exactly_if_it_says_so(name):
    site, method = make_site(*WIDE), METHODS[name]
    small, large = (method.fit(site.weight_kept, site.fit, value).weight for value in (1.0, 1000.0))
    assert torch.equal(small, large) != method.uses_strength


@pytest.mark.parametrize("name", WITH_LAMBDA)
@pytest.mark.parametrize("strength", [0.0, LAMBDA, 1e4])
def test_methods_that_name_a_ridge_are_ridges(name, strength):
    """The choice on folds scores it as one, without asking the method itself."""
    site, method = make_site(*WIDE), METHODS[name]
    assert method.ridge_towards == {"ridge": "kept", "affine": "kept", "grail": "zero"}[name]
    base = site.weight_kept if method.ridge_towards == "kept" else torch.zeros_like(site.weight_kept)
    fit = site.fit.centre() if method.adds_bias else site.fit
    solution = method.fit(site.weight_kept, site.fit, strength)
    torch.testing.assert_close(solution.weight, shrink(base, fit, strength))
    if method.adds_bias:
        torch.testing.assert_close(solution.bias, site.fit.target_mean - solution.weight @ site.fit.mean)


@pytest.mark.parametrize("tokens", [200, 4], ids=["full rank", "few tokens"])
@pytest.mark.parametrize("shape", [(12, 10, 10), (6, 16, 16), (8, 8, 8)])
@pytest.mark.parametrize("name", METHODS)
def test_nothing_dropped_changes_nothing(name, shape, tokens):
    if name == "grail":
        pytest.skip("shrinks to zero by construction")
    if name == "least-squares" and tokens < 8:
        pytest.skip("a pseudo-inverse forgets what the tokens do not show")
    site = make_site(*shape, tokens)
    solution = METHODS[name].fit(site.weight_kept, site.fit, LAMBDA)
    close(solution.weight, site.weight.numpy())
    if solution.bias is not None:
        assert solution.bias.abs().max() < 1e-6


@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_affine_is_corp_as_printed(shape):
    site = make_site(*shape)
    weight, bias = closed_forms.corp(
        site.weight.numpy(), site.tokens.numpy(), site.kept.numpy(), site.dropped.numpy(), LAMBDA
    )
    solution = METHODS["affine"].fit(site.weight_kept, site.fit, LAMBDA * site.fit.count)
    close(solution.weight, weight)
    close(solution.bias, bias)


@pytest.mark.parametrize("name", WITH_LAMBDA)
def test_singular_gram_without_lambda_reaches_the_least_error(name):
    """Fewer tokens than inputs: the fit is exact, and what the tokens do not show stays as the method leaves it."""
    site = make_site(6, 16, 11, 5)
    solution = METHODS[name].fit(site.weight_kept, site.fit, 0.0)
    assert squared_error(solution, site.fit) < 1e-9 * site.fit.target_energy
    start = torch.zeros_like(site.weight_kept) if name == "grail" else site.weight_kept
    inputs = site.inputs - site.inputs.mean(0) if name == "affine" else site.inputs
    unseen = torch.linalg.svd(inputs)[2][4 if name == "affine" else 5 :].T
    torch.testing.assert_close(solution.weight @ unseen, start @ unseen, rtol=1e-6, atol=1e-8)


def test_details():
    site = make_site(*WIDE)
    assert METHODS["ridge"].fit(site.weight_kept, site.fit, LAMBDA).details == {"strength": LAMBDA}
    scaled, plain = (METHODS[n].fit(site.weight_kept, site.fit, 0.0) for n in ("rotation-scale", "rotation"))
    torch.testing.assert_close(scaled.weight, plain.weight * scaled.details["scale"])
    assert not plain.details


def test_absolute_strength():
    fit = make_site(*WIDE).fit
    assert absolute_strength(0.5, "absolute", fit) == 0.5
    assert absolute_strength(0.5, "relative", fit) == pytest.approx(0.5 * float(fit.gram.trace()) / 11)
    assert absolute_strength(0.5, "absolute", dataclasses.replace(fit, gram=None)) == 0.5
    with pytest.raises(ValueError, match="second moments"):
        absolute_strength(0.5, "relative", dataclasses.replace(fit, gram=None))
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="zero or more"):
            absolute_strength(value, "absolute", fit)
