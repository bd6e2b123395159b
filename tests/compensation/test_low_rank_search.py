"""The search itself: against alternating least squares on the operator written out, whatever float32 is off by."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt_prune.compensation.low_rank_search import LogitMetric, search_factors, start_from_svd


def lopsided_metric(d: int, spread: float) -> tuple[LogitMetric, Tensor]:
    """A metric that is the identity and some of what is not, and the matrix (d², d²) of its operator."""
    g = torch.Generator().manual_seed(d)
    parts = torch.randn(2, 7, d, d, generator=g, dtype=torch.float64)
    grams = parts.mT @ parts * spread / d
    matrix = torch.eye(d * d, dtype=torch.float64) + sum(torch.kron(*pair) for pair in grams.transpose(0, 1))

    def image(Z: Tensor) -> Tensor:
        return (matrix @ Z.reshape(len(Z), -1).T).T.reshape(Z.shape)

    one = torch.eye(d, dtype=torch.float64)
    return LogitMetric(image, image, one + torch.diag(torch.linspace(0, 3, d, dtype=torch.float64)), one, one), matrix


def value(metric: LogitMetric, X: Tensor, Y: Tensor) -> float:
    residual = metric.target - X @ Y.T
    return float((residual * metric.image(residual[None])[0]).sum())


def alternate(metric: LogitMetric, matrix: Tensor, start: tuple[Tensor, Tensor]) -> float:
    """Alternate least squares between the two factors many times, and return the error that is left."""
    root = np.linalg.cholesky(matrix.numpy()).T
    X, Y = (part.numpy() for part in start)
    d, size = X.shape
    for _ in range(400):
        for factor in range(2):
            # vec by rows: vec(X Yᵀ) = (I ⊗ Y) vec X, and (X ⊗ I) vec Yᵀ of the transpose.
            if factor == 0:
                basis = np.kron(np.eye(d), Y)
            else:
                basis = np.kron(X, np.eye(d)).reshape(d * d, size, d).transpose(0, 2, 1).reshape(d * d, d * size)
            solved = np.linalg.lstsq(root @ basis, root @ metric.target.numpy().ravel(), rcond=None)[0].reshape(d, size)
            X, Y = (solved, Y) if factor == 0 else (X, solved)
    return value(metric, torch.from_numpy(X), torch.from_numpy(Y))


@pytest.mark.parametrize("spread", [0.01, 0.3])
@pytest.mark.parametrize(("d", "size"), [(4, 2), (5, 1)])
def test_it_ends_where_alternating_least_squares_do(d, size, spread):
    metric, matrix = lopsided_metric(d, spread)
    start = start_from_svd(metric, size)
    ours = value(metric, *search_factors(metric, start, 1e-13, 1000))
    assert ours < value(metric, *start)
    assert ours == pytest.approx(alternate(metric, matrix, start), rel=1e-7)


def test_what_the_coarse_products_are_off_by_does_not_show():
    metric, _ = lopsided_metric(5, 0.3)
    g = torch.Generator().manual_seed(0)
    noise = 1e-3 * torch.randn(5, 5, generator=g, dtype=torch.float64)
    off = LogitMetric(metric.image, lambda Z: metric.image(Z) + noise @ Z, metric.target, metric.left, metric.right)
    start = start_from_svd(metric, 2)
    exact, through = (value(metric, *search_factors(variant, start, 1e-12, 500)) for variant in (metric, off))
    assert through == pytest.approx(exact, rel=1e-9)
