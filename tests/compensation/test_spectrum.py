import dataclasses
import math

import numpy as np
import pytest
import torch

from ckpt_prune.compensation.spectrum import leading, spectrum
from ckpt_prune.measure.moments.inputs import Moments


def moments_of(tokens: torch.Tensor, dtype: torch.dtype = torch.float64) -> Moments:
    moments = Moments.zeros(tokens.shape[1], gram=False).accumulate(tokens)
    return dataclasses.replace(moments, gram=(tokens.T @ tokens).to(dtype))


def oracle(tokens: torch.Tensor) -> tuple[float, int]:
    """By the singular values of the centred activations, counting one direction after the other."""
    centred = tokens.numpy() - tokens.numpy().mean(0)
    variances = np.linalg.svd(centred, compute_uv=False) ** 2
    shares = [v / variances.sum() for v in variances if v > 1e-13 * variances.sum()]
    k, explained = 0, 0.0
    while explained < 0.95 - 1e-12:
        explained += shares[k]
        k += 1
    return math.exp(-sum(p * math.log(p) for p in shares)), k


def count_inputs(tokens: torch.Tensor) -> int:
    """Inputs of most variance, taken one after the other until they hold 95 %."""
    variances = sorted(((x - sum(x) / len(x)) ** 2).sum() for x in tokens.numpy().T)
    k, explained = 0, 0.0
    while explained < (0.95 - 1e-12) * sum(variances):
        k += 1
        explained += variances[-k]
    return k


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def isotropic(d: int) -> torch.Tensor:
    """Tokens whose covariance is a multiple of the identity exactly, around a mean."""
    return torch.cat([torch.eye(d), -torch.eye(d)]).double() * 3 + 1


def measure_spectrum(tokens: torch.Tensor) -> tuple[float, int]:
    result = spectrum(moments_of(tokens))
    return result.effective_rank, result.k95


@pytest.mark.parametrize(("tokens", "d"), [(200, 12), (9, 12), (40, 1)], ids=["many", "fewer than inputs", "one input"])
def test_equals_the_svd_of_centred_activations(tokens, d):
    x = normal(tokens, d) @ normal(d, d, seed=1) + 2
    rank, k95 = oracle(x)
    assert measure_spectrum(x) == (pytest.approx(rank, rel=1e-7), k95)
    assert d == 1 or 1 < rank < d
    assert spectrum(moments_of(x)).k95_inputs == count_inputs(x) >= k95


@pytest.mark.parametrize(("d", "k95"), [(1, 1), (10, 10), (20, 19), (41, 39), (80, 76), (120, 114)])
def test_isotropic(d, k95):
    """95 % of 20 equal directions is exactly 19 of them; sums of 80 or 120 shares fall a rounding short of it."""
    assert measure_spectrum(isotropic(d)) == (pytest.approx(d), k95)
    assert spectrum(moments_of(isotropic(d))).k95_inputs == k95


def test_active_is_the_mean_share():
    x = torch.tensor([[0.0, 1, 1e-7, -1], [0, 2, 0.5, 0], [0, 3, 0, -4], [0, 4, 0, 0]]).double()
    assert spectrum(moments_of(x)).active == pytest.approx((0 + 4 + 1 + 2) / 16)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
def test_inputs_that_never_vary_have_no_rank(value):
    result = spectrum(moments_of(torch.full((30, 5), value).double(), torch.float32))
    assert dataclasses.astuple(result) == (0.0, 0, 0, float(value > 0))


def test_refusals():
    moments = moments_of(normal(5, 3))
    with pytest.raises(ValueError, match="second moments"):
        spectrum(dataclasses.replace(moments, gram=None))
    with pytest.raises(ValueError, match="at least one token"):
        spectrum(Moments.zeros(3, gram=True))


class TestWide:
    """Above a width the largest eigenvalues are found at random."""

    @staticmethod
    def decaying(d: int, tokens: int = 400) -> torch.Tensor:
        """Tokens whose variances fall off like those of a network's inputs."""
        turn = torch.linalg.qr(normal(d, d, seed=3)).Q
        return normal(tokens, d, seed=4) @ (turn * torch.arange(1, d + 1).double() ** -1.0) @ turn.T

    def test_the_largest_eigenvalues(self):
        x = self.decaying(120)
        scatter = (x - x.mean(0)).T @ (x - x.mean(0))
        true = torch.linalg.eigvalsh(scatter).flip(0)
        largest = leading(scatter, 20)
        assert bool((largest <= true[:20] * (1 + 1e-9)).all())
        torch.testing.assert_close(largest, true[:20], rtol=5e-3, atol=0)

    def test_the_figures_are_near_the_exact_ones(self):
        moments = moments_of(self.decaying(120))
        true, near = spectrum(moments), spectrum(moments, exact=100, sketch=40)
        assert near.effective_rank == pytest.approx(true.effective_rank, rel=0.02)
        assert near.effective_rank >= true.effective_rank * (1 - 1e-6)
        assert near.k95 == true.k95 < 40
        assert near.active == true.active
