"""Systems solved with the factor in the place of the matrix, against numpy's inverse and pseudo-inverse."""

import numpy as np
import pytest
import torch

from ckpt_prune.compensation import least_squares


@pytest.fixture
def small_panels(monkeypatch):
    monkeypatch.setattr(least_squares, "FACTORED_IN_PLACE", 1)
    monkeypatch.setattr(least_squares, "PANEL", 4)


def make_gram(width: int, rank: int) -> torch.Tensor:
    tokens = torch.randn(rank, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    gram = tokens.T @ tokens
    return (gram + gram.T) / 2


@pytest.mark.parametrize("rank", [40, 2], ids=["regular", "singular"])
@pytest.mark.parametrize("width", [3, 4, 8, 11])
def test_solves_in_place_as_numpy_does(width, rank, small_panels):
    gram, right = make_gram(width, rank), torch.randn(5, width, dtype=torch.float64)
    before = gram.clone()
    solution = least_squares.solve(gram, right)
    inverse = np.linalg.pinv(before.numpy(), rcond=least_squares.RELATIVE_CUTOFF, hermitian=True)
    np.testing.assert_allclose(solution.numpy(), right.numpy() @ inverse, rtol=1e-8, atol=1e-10)
    assert torch.equal(gram, before)


def test_a_failing_panel_leaves_the_matrix_as_it_was(small_panels):
    gram, right = make_gram(11, 40), torch.randn(2, 11, dtype=torch.float64)
    gram[5], gram[:, 5] = 0.0, 0.0
    before = gram.clone()
    solution = least_squares.solve(gram, right)
    np.testing.assert_allclose(solution.numpy(), right.numpy() @ np.linalg.pinv(before.numpy()), rtol=1e-8, atol=1e-10)
    assert torch.equal(gram, before)


def test_no_second_matrix_is_factorised(small_panels, monkeypatch):
    widths = []
    factorise = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda part: widths.append(len(part)) or factorise(part))
    least_squares.solve(make_gram(11, 40), torch.ones(1, 11, dtype=torch.float64))
    assert widths == [4, 4, 3]
