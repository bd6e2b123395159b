"""Figures of two sets of hidden states, against their definitions in float64 over all tokens at once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_prune.evaluation.similarity import Similarity, SimilaritySums


def by_hand(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float, float]:
    x, y = a - a.mean(0), b - b.mean(0)
    cosines = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    # Kornblith et al. 2019, by the Gram matrices over tokens that they define it with (HSIC).
    kernels = [x @ x.T, y @ y.T]
    hsic = [[float((one * other).sum()) for one in kernels] for other in kernels]
    return (
        float(((b - a) ** 2).mean()),
        float(((b - a) ** 2).sum() / (a**2).sum()),
        float(cosines.mean()),
        hsic[0][1] / np.sqrt(hsic[0][0] * hsic[1][1]),
    )


def summed(a: np.ndarray, b: np.ndarray, parts: int = 3) -> Similarity:
    sums = SimilaritySums()
    for one, other in zip(np.array_split(a, parts), np.array_split(b, parts), strict=True):
        sums.add(torch.from_numpy(one), torch.from_numpy(other))
    return sums.figures()


@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_figures_are_those_of_all_tokens(mean):
    """Also where the mean of a dimension is far larger than its spread, as in the streams of large models."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(40, 6)) + mean * np.eye(6)[0]
    b = a @ rng.normal(size=(6, 6)) * 0.3 + a + 0.1 * rng.normal(size=(40, 6))
    found = summed(a, b)
    assert (found.mse, found.relative_error, found.cosine, found.cka) == pytest.approx(by_hand(a, b), rel=1e-5)


@given(seed=st.integers(0, 1000), scale=st.floats(0.1, 10))
def test_a_rotation_and_a_scale_leave_the_alignment_alone(seed, scale):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(30, 4))
    turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    assert summed(a, scale * a @ turn).cka == pytest.approx(1, abs=1e-5)


def test_where_there_is_nothing_to_compare():
    zero, one = np.zeros((4, 3)), np.ones((4, 3))
    assert summed(zero, zero) == Similarity(0.0, None, 1.0, None)
    assert summed(one, zero) == Similarity(1.0, 1.0, 0.0, None)
    with pytest.raises(ValueError, match="without tokens"):
        SimilaritySums().figures()
