"""Figures of two sets of hidden states, against their definitions in float64 over all tokens at once."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import similarity as oracle
from sklearn.metrics.pairwise import paired_cosine_distances

from ckpt_prune.evaluation.similarity import Similarity, StateSimilarity

# What the Grams' products allow: of float32 values, in float32.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}
SEEDS = st.integers(0, 2**16)


def pair(tokens: int, width: int, *, seed: int = 0, noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (tokens, width) float64 of features of unlike size, and the same mixed a little and disturbed."""
    generator = torch.Generator().manual_seed(seed)
    x, disturbance = torch.randn(2, tokens, width, generator=generator, dtype=torch.float64)
    x *= torch.linspace(0.3, 3, width, dtype=torch.float64)
    return x, x + 0.4 * x.roll(1, 1) + noise * disturbance


def similarity(ours: torch.Tensor, theirs: torch.Tensor, cuts: tuple[int, ...] = ()) -> StateSimilarity:
    """Add tokens in batches, cut before the given indices; some batches may be empty."""
    sums = StateSimilarity()
    for x, y in zip(ours.tensor_split(cuts), theirs.tensor_split(cuts), strict=True):
        sums.add(x, y)
    return sums


def orthogonal(width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]


def cuts_of(tokens: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, tokens), max_size=5).map(lambda cuts: tuple(sorted(cuts)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "width"), [(40, 7), (5, 12), (2, 3), (30, 1)])
def test_both_figures_are_those_of_the_definitions(dtype, tokens, width):
    x, y = (side.to(dtype) for side in pair(tokens, width))
    state_similarity = similarity(x, y, (tokens // 3,))
    X, Y = x.double().numpy(), y.double().numpy()
    assert state_similarity.mse == pytest.approx(oracle.mse(X, Y), rel=1e-12)
    assert state_similarity.cka == pytest.approx(oracle.cka(X, Y), rel=TOLERANCE[dtype])


def test_figures_worked_out_by_hand():
    # Centred, (±1, 0), (0, ±1) against (±1, 0), (0, 0) twice: XᵀX is 2 I; YᵀX and YᵀY are 2 in one entry and else 0.
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    y = torch.tensor([[6.0, 5.0], [4.0, 5.0], [5.0, 5.0], [5.0, 5.0]])
    state_similarity = similarity(x, y, (1, 3))
    assert state_similarity.mse == (8 * 25 + 2) / 8
    assert state_similarity.cka == pytest.approx(4 / (math.sqrt(8) * 2), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, cuts=cuts_of(30), offset=st.sampled_from([0.0, 1e3, 1e6]))
def test_any_batches_give_the_same(seed, cuts, offset):
    x, y = pair(30, 6, seed=seed)
    x[:, 2] += offset
    unsplit, split = similarity(x, y), similarity(x, y, cuts)
    assert split.mse == pytest.approx(unsplit.mse, rel=1e-12)
    assert split.cka == pytest.approx(unsplit.cka, rel=1e-8)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, turned=st.sampled_from([0, 1]), exponent=st.floats(-30, 30), offset=st.floats(-100, 100))
def test_cka_sees_no_rotation_no_scale_and_no_offset(seed, turned, exponent, offset):
    sides = list(pair(30, 6, seed=seed))
    before = similarity(*sides, (10,)).cka
    sides[turned] = 10**exponent * (sides[turned] @ orthogonal(6, seed + 1) + offset)
    assert similarity(*sides, (10,)).cka == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [1, 64])
def test_massive_activations_cancel_no_digits(dtype, first):
    """A few features lie a thousand times further from zero than the tokens from each other."""
    x, y = pair(256, 8)
    offset = torch.zeros(8, dtype=torch.float64)
    offset[1], offset[5] = 4096, -2048
    x, y = (x + offset).to(dtype), (y + offset).to(dtype)
    state_similarity = similarity(x, y, (first, 100, 200))
    # Taken off in float64, so what is left is exact; the oracle never meets the offset.
    X, Y = (x.double() - offset).numpy(), (y.double() - offset).numpy()
    assert state_similarity.mse == pytest.approx(oracle.mse(X, Y), rel=1e-12)
    assert state_similarity.cka == pytest.approx(oracle.cka(X, Y), rel=2e-6)


@pytest.mark.parametrize("value", [0.1, 1000.1, 3e30])
@pytest.mark.parametrize("cuts", [(), (1, 7)])
def test_a_constant_stream(value, cuts):
    varying = pair(30, 6)[0]
    # Of a double like 0.1 the plain mean of 30 is not the double itself.
    constant = torch.full((30, 6), value, dtype=torch.float64)
    assert similarity(constant, constant, cuts).cka == 1.0
    assert similarity(constant, constant, cuts).mse == 0.0
    assert similarity(constant, 2 * constant, cuts).cka == 1.0
    assert similarity(constant, varying, cuts).cka == 0.0
    assert similarity(varying, constant, cuts).cka == 0.0


FINITE = {
    "float32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "float64": st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([sys.float_info.max, -sys.float_info.max, 5e-324]),
}


@settings(max_examples=50, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["float32", "float64"]), cuts=cuts_of(4))
def test_finite_input_never_gives_nan(data, dtype, cuts):
    values = data.draw(st.lists(FINITE[dtype], min_size=16, max_size=16))
    x, y = torch.tensor(values, dtype=getattr(torch, dtype)).view(2, 4, 2)
    state_similarity = similarity(x, y, cuts)
    assert 0.0 <= state_similarity.cka <= 1.0
    assert state_similarity.mse >= 0.0


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e35), (torch.float32, 1e-35), (torch.float64, 1e300)])
@pytest.mark.parametrize("cuts", [(), (3, 20)])
def test_hidden_states_whose_squares_are_out_of_range(dtype, scale, cuts):
    x, y = pair(30, 6)
    expected = oracle.cka(x.numpy(), y.numpy())
    assert similarity((scale * x).to(dtype), y.to(dtype), cuts).cka == pytest.approx(expected, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("token", [0, 12])
def test_hidden_states_that_are_not_finite(bad, side, token):
    sides = pair(30, 6)
    sides[side][token, 3] = bad
    state_similarity = similarity(*sides, (10, 20))
    assert math.isnan(state_similarity.cka)
    assert not math.isfinite(state_similarity.mse)


@pytest.mark.parametrize("batches", [0, 1])
def test_nothing_added_is_refused(batches):
    sums = StateSimilarity()
    for _ in range(batches):
        sums.add(torch.empty(0, 4), torch.empty(0, 4))
    with pytest.raises(ValueError, match="no hidden states were added"):
        _ = sums.mse
    with pytest.raises(ValueError, match="no hidden states were added"):
        _ = sums.cka


def test_shapes_that_do_not_fit_are_refused():
    sums = similarity(torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(3, 3\)"):
        sums.add(torch.ones(2, 3), torch.ones(3, 3))
    with pytest.raises(ValueError, match="width 3 after batches of width 1"):
        sums.add(torch.ones(2, 3), torch.ones(2, 3))
    assert sums.mse == 0.0


def figures(a: np.ndarray, b: np.ndarray) -> Similarity:
    """Compare a model's states `b` with those of a reference, in three batches."""
    return similarity(torch.from_numpy(b), torch.from_numpy(a), (13, 30)).figures()


@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_figures_are_those_of_all_tokens(mean):
    """Also where the mean of a dimension is far larger than its spread, as in the streams of large models."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(40, 6)) + mean * np.eye(6)[0]
    b = a @ rng.normal(size=(6, 6)) * 0.3 + a + 0.1 * rng.normal(size=(40, 6))
    result = figures(a, b)
    expected = ((b - a) ** 2).sum() / (a**2).sum(), 1 - paired_cosine_distances(a, b).mean(), oracle.cka(a, b)
    assert (result.relative_error, result.cosine, result.cka) == pytest.approx(expected, rel=1e-5)
    assert result.mse == pytest.approx(oracle.mse(a, b), rel=1e-12)


def test_where_there_is_nothing_to_compare():
    zero, one = np.zeros((4, 3)), np.ones((4, 3))
    assert figures(zero, zero) == Similarity(0.0, None, 1.0, None)
    assert figures(one, zero) == Similarity(1.0, 1.0, 0.0, None)
    with pytest.raises(ValueError, match="nothing to compare"):
        StateSimilarity().figures()
