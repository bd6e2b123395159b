from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import closed_forms

from ckpt_prune.compensation import rotation as module
from ckpt_prune.compensation.fit import fit_from_moments, squared_error
from ckpt_prune.compensation.rotation import centred_rotation, polar, rotation, scaled_rotation
from ckpt_prune.measure.moments.inputs import Moments

from .sites import SHAPES, make_site


def with_singular_values(values: torch.Tensor, m: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """An (m, n) matrix with these singular values, and its polar factor."""
    g = torch.Generator().manual_seed(seed)
    n = values.numel()
    u = torch.linalg.qr(torch.randn(m, n, generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
    return (u * values) @ v.T, u @ v.T


def orthonormality(q: torch.Tensor) -> float:
    return float((q.T @ q - torch.eye(q.shape[1], dtype=q.dtype)).norm())


@pytest.fixture
def no_decomposition(monkeypatch):
    """Only the iteration may answer."""

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("fell back to the singular value decomposition")

    monkeypatch.setattr(module, "_by_decomposition", refuse)


@pytest.mark.usefixtures("no_decomposition")
@pytest.mark.parametrize("single_from", [1, 10**9], ids=["late steps in float32", "float64 only"])
@pytest.mark.parametrize("m", [40, 55])
@pytest.mark.parametrize("condition", [1.0, 30.0, 1e3, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_polar_by_iteration(m, condition, size, single_from, monkeypatch):
    monkeypatch.setattr(module, "SINGLE_PRECISION_FROM", single_from)
    values = torch.logspace(0, -float(np.log10(condition)), 40, dtype=torch.float64)
    matrix, expected = with_singular_values(size * values, m)
    q = polar(matrix)
    assert orthonormality(q) < 1e-7
    tolerance = 1e-5 if single_from == 1 else 1e-6 if condition > 1e6 else 1e-8
    assert (q - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("n", [3, 256, 300, 700])
def test_products_that_skip_half(n):
    g = torch.Generator().manual_seed(n)
    x, square = (torch.randn(rows, n, generator=g, dtype=torch.float64) for rows in (5, n))
    torch.testing.assert_close(module._gram(x), x.T @ x)
    lower = square.tril()
    torch.testing.assert_close(module._times_lower(x, lower), x @ lower)
    torch.testing.assert_close(module._times_upper(x, lower), x @ lower.T)


@pytest.mark.parametrize("m", [9, 12])
def test_polar_of_zero_is_the_identity(m):
    torch.testing.assert_close(polar(torch.zeros(m, 9, dtype=torch.float64)), torch.eye(m, 9, dtype=torch.float64))


@pytest.mark.parametrize("noise", [0.0, 1e-17])
@pytest.mark.parametrize("m", [9, 12])
def test_polar_of_a_singular_matrix_is_the_nearest_completion(m, noise):
    values = torch.cat([torch.linspace(3, 1, 5), torch.full((4,), noise)]).double()
    matrix, _ = with_singular_values(values, m)
    nearest = with_singular_values(torch.ones(9).double(), m, seed=7)[1]
    q = polar(matrix, nearest=lambda: nearest)
    assert orthonormality(q) < 1e-8
    u, s, vt = torch.linalg.svd(matrix)
    assert (q @ vt[:5].T - u[:, :5]).norm() < 1e-8
    assert float((q * matrix).sum()) == pytest.approx(float(s.sum()))
    # No other completion is nearer: turning the free part at random only moves it away.
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        turn = torch.linalg.qr(torch.randn(m - 5, m - 5, generator=g, dtype=torch.float64))[0]
        free = u[:, 5:] @ turn[:, :4] @ vt[5:]
        other = u[:, :5] @ vt[:5] + free
        assert (q - nearest).norm() <= (other - nearest).norm()


def test_directions_beyond_the_known_rank_are_noise():
    """A float32 Gram of 5 tokens has rank 5 plus rounding: the rounding must not choose a rotation."""
    values = torch.cat([torch.linspace(3, 1, 5), torch.full((4,), 1e-6)]).double()
    matrix, _ = with_singular_values(values, 9)
    clean, _ = with_singular_values(values.where(values > 1e-3, 0.0), 9)
    torch.testing.assert_close(polar(matrix, rank=5), polar(clean), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_few_tokens_reach_the_least_error_and_turn_the_weights_least(shape):
    site = make_site(*shape[:3], 3)
    ours = rotation(site.weight_kept, site.fit)
    arguments = [t.numpy() for t in (site.weight_kept, site.inputs, site.targets)]
    paper = closed_forms.rotation(*arguments)
    assert squared_error(ours, site.fit) == pytest.approx(closed_forms.residual(*arguments[1:], paper), rel=1e-7)
    moved = (ours.weight - site.weight_kept).norm()
    assert moved < 0.9 * (torch.from_numpy(paper[0]) - site.weight_kept).norm()


def test_rank_deficient_kept_weights():
    site = make_site(12, 10, 7, 200)
    weight = site.weight.clone()
    weight[:, site.kept[2]] = weight[:, site.kept[4]]
    weight[:, site.kept[5]] = 0
    fit = type(site)(weight, site.tokens, site.kept).fit
    kept = weight[:, site.kept]
    ours = rotation(kept, fit).weight
    paper = closed_forms.rotation(kept.numpy(), site.inputs.numpy(), (site.tokens @ weight.T).numpy())[0]
    assert (ours - torch.from_numpy(paper)).norm() < 1e-7 * kept.norm()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(0.1, 10), k=st.integers(1, 8))
def test_recovers_a_rotation_and_a_scale(seed, scale, k):
    """Targets that are a turned and scaled pruned output: the answer is known."""
    site = make_site(6, 8, k, 60, seed)
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=g, dtype=torch.float64))[0]
    target = scale * site.inputs @ site.weight_kept.T @ turn.T
    fit = type(site.fit)(
        60,
        site.inputs.sum(0),
        target.sum(0),
        site.fit.gram,
        target.T @ site.inputs,
        float(target.square().sum()),
    )
    solution = scaled_rotation(site.weight_kept, fit)
    assert solution.details["scale"] == pytest.approx(scale, rel=1e-6)
    assert (solution.weight - scale * turn @ site.weight_kept).norm() < 1e-4 * scale * site.weight_kept.norm()


def test_a_centred_rotation_restores_the_mean():
    site = make_site(6, 16, 8, 200)
    solution = centred_rotation(site.weight_kept, site.fit)
    torch.testing.assert_close(solution.weight @ site.inputs.mean(0) + solution.bias, site.targets.mean(0))


def test_a_dead_projection_is_left_alone():
    site = make_site(6, 16, 8, 50)
    dead = type(site)(site.weight, torch.zeros_like(site.tokens), site.kept)
    for form in (rotation, scaled_rotation, centred_rotation):
        torch.testing.assert_close(form(site.weight_kept, dead.fit).weight, site.weight_kept)


def test_what_is_far_from_orthonormal_is_not_polished():
    """Newton-Schulz would go elsewhere: the decomposition answers then."""
    for matrix in (torch.zeros(5, 3, dtype=torch.float64), torch.full((5, 3), torch.nan, dtype=torch.float64)):
        assert module._polish(matrix) is None
    turned = torch.linalg.qr(torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    polished = module._polish(turned * 1.01)
    assert polished is not None
    assert orthonormality(polished) < 1e-12


def test_a_polish_that_does_not_get_there_is_none(monkeypatch):
    monkeypatch.setattr(module, "ORTHOGONAL", -1.0)
    assert module._polish(torch.eye(4, dtype=torch.float64)) is None


def test_a_step_that_cannot_be_factored_falls_back_to_the_decomposition(monkeypatch):
    failed = torch.tensor(1, dtype=torch.int32)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda gram: (gram, failed))
    matrix, expected = with_singular_values(torch.tensor([1.0, 0.5, 0.01], dtype=torch.float64), 5)
    torch.testing.assert_close(polar(matrix), expected)


@pytest.mark.parametrize("shape", [(32, 48, 40), (40, 48, 24)], ids=["k>d_out", "k<d_out"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("mean", [0.0, 20.0])
def test_what_float32_grams_do_not_tell_is_completed(shape, centred, mean):
    """Many tokens of few directions: outside of these the output stays as near to the bare one as with exact sums."""
    d_out, d_in, k = shape
    g = torch.Generator().manual_seed(0)
    directions = torch.randn(10, d_in, generator=g, dtype=torch.float64)
    tokens = (torch.randn(3000, 10, generator=g, dtype=torch.float64) + mean) @ directions
    weight = torch.randn(d_out, d_in, generator=g, dtype=torch.float64)
    kept = torch.arange(k)
    exact, rounded = (Moments.zeros(d_in, gram=True) for _ in "ab")
    exact = replace(exact, gram=torch.zeros(d_in, d_in, dtype=torch.float64)).accumulate(tokens)
    rounded = rounded.accumulate(tokens.float())
    assert rounded.gram.dtype == (torch.float64 if mean else torch.float32)
    form = centred_rotation if centred else rotation
    truth, estimate = (
        form(weight[:, kept], fit_from_moments(weight, moments, kept)).weight for moments in (exact, rounded)
    )
    others = torch.randn(2000, k, generator=g, dtype=torch.float64)
    off = others - others @ torch.linalg.pinv(directions[:, :k]) @ directions[:, :k]
    lost = [float((off @ (fitted - weight[:, kept]).T).square().sum()) for fitted in (truth, estimate)]
    energy = float((off @ weight[:, kept].T).square().sum())
    assert lost[1] / energy == pytest.approx(lost[0] / energy, rel=1e-2)
    assert (estimate - truth).norm() < 1e-2 * truth.norm()
