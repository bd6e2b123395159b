"""Two thin matrices in the place of one, against SVD-LLM's formula and a minimiser that knows none."""

import numpy as np
import pytest
import torch

from ckpt_prune.compensation.factoring import (
    direction_energies,
    factor,
    rank_for_ratio,
    refit_factors,
    saves_parameters,
)
from tests.oracles import factors

SHAPES = [(6, 9), (9, 6), (7, 7)]


def drawn(rows: int, columns: int, tokens: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """W (rows, columns) and X (tokens, columns) of unequal scales."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(tokens, columns)) @ rng.normal(size=(columns, columns))
    return rng.normal(size=(rows, columns)), X


def error(W: np.ndarray, product: np.ndarray, X: np.ndarray) -> float:
    return float(np.linalg.norm((W - product) @ X.T) ** 2)


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_published_formula(shape, rank):
    W, X = drawn(*shape)
    factored = factor(torch.from_numpy(W), torch.from_numpy(X.T @ X), rank)
    product = (factored.up @ factored.down).numpy()
    np.testing.assert_allclose(product, factors.svd_llm(W, X, rank), rtol=1e-6, atol=1e-8)
    assert factored.error == pytest.approx(error(W, product, X) / error(W, 0 * W, X), rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_other_product_of_its_rank_is_nearer(shape):
    W, X = drawn(*shape)
    factored = factor(torch.from_numpy(W), torch.from_numpy(X.T @ X), 2)
    least = min(factors.alternating(W, X, 2, seed) for seed in range(3))
    assert error(W, (factored.up @ factored.down).numpy(), X) == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_singular_gram(shape):
    """Fewer tokens than inputs: the rest of W is free, and beyond the rank of the outputs nothing is lost."""
    W, X = drawn(*shape, tokens=3)
    for rank in (2, 3, 5):
        factored = factor(torch.from_numpy(W), torch.from_numpy(X.T @ X), rank)
        product = (factored.up @ factored.down).numpy()
        expected = error(W, factors.truncate(W, X, rank), X)
        assert error(W, product, X) == pytest.approx(expected, abs=1e-9 * error(W, 0 * W, X))
        torch.testing.assert_close(factored.up.T @ factored.up, torch.eye(rank, dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_data_it_is_the_plain_decomposition(shape):
    W, _ = drawn(*shape)
    U, values, Vt = np.linalg.svd(W, full_matrices=False)
    factored = factor(torch.from_numpy(W), None, 2)
    np.testing.assert_allclose((factored.up @ factored.down).numpy(), (U[:, :2] * values[:2]) @ Vt[:2], atol=1e-9)
    assert factored.error == pytest.approx((values[2:] ** 2).sum() / (values**2).sum())


@pytest.mark.parametrize("shape", SHAPES)
def test_energies_are_the_errors_of_every_rank(shape):
    W, X = drawn(*shape)
    energies = direction_energies(torch.from_numpy(W), torch.from_numpy(X.T @ X))
    assert energies.shape == (min(shape),)
    for rank in (1, 4):
        assert energies[rank:].sum().item() == pytest.approx(error(W, factors.truncate(W, X, rank), X))


def test_nothing_comes_in():
    factored = factor(torch.ones(3, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64), 1)
    assert factored.error == 0
    assert bool(factored.down.isfinite().all())


def test_ranks_are_the_published_ones():
    # SVD-LLM on LLaMA-7B at 20 %: q, k, v, o of 4096 x 4096 and the mlp of 11008 x 4096
    assert (rank_for_ratio(4096, 4096, 0.2), rank_for_ratio(11008, 4096, 0.2)) == (1638, 2388)
    assert rank_for_ratio(4, 4, 0.9) == 1
    assert saves_parameters(4096, 4096, 2047)
    assert not saves_parameters(4096, 4096, 2048)


@pytest.mark.parametrize("tokens", [40, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_update_is_least_squares_on_what_reaches_the_linear(shape, tokens):
    """Also where so few tokens come through that many U do as well."""
    (W, X), (_, other) = drawn(*shape), drawn(*shape, tokens=tokens, seed=1)
    first = factor(torch.from_numpy(W), torch.from_numpy(X.T @ X), 4)
    factored = refit_factors(torch.from_numpy(W), torch.from_numpy(other.T @ other), first.down)
    expected = factors.solve_update(W, other, first.down.numpy())
    np.testing.assert_allclose(factored.up.numpy(), expected, rtol=1e-5, atol=1e-6)
    lost = error(W, (factored.up @ factored.down).numpy(), other)
    assert factored.error == pytest.approx(lost / error(W, 0 * W, other), rel=1e-6, abs=1e-12)
    assert lost <= error(W, (first.up @ first.down).numpy(), other) * (1 + 1e-9)
