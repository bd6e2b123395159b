import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.statistics.folder import pack_symmetric, unpack_symmetric
from ckpt_prune.measure.streams.hidden_stream import split_folds

VECTORS = ("sum", "square", "absolute", "active")
TOLERANCES = [(torch.float32, 1e-12, 1e-12), (torch.float16, 1e-12, 1e-12), (torch.bfloat16, 2e-6, 1e-3)]
"""Of sums, relative and absolute: those of bfloat16 tokens are taken in float32, a few hundred at a time."""


def tokens(count: int, width: int = 5, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, width)).astype(np.float32) + np.arange(width, dtype=np.float32)
    x[rng.random(x.shape) < 0.3] = 0
    return x


def assert_moments_of(moments: Moments, x: np.ndarray, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    x = x.astype(np.float64)
    assert moments.count == len(x)
    np.testing.assert_allclose(moments.sum, x.sum(0), rtol=rtol, atol=atol)
    np.testing.assert_allclose(moments.square, (x**2).sum(0), rtol=rtol)
    np.testing.assert_allclose(moments.absolute, np.abs(x).sum(0), rtol=rtol)
    np.testing.assert_array_equal(moments.active, (x != 0).sum(0))
    assert {getattr(moments, name).dtype for name in VECTORS} == {torch.float64}
    if moments.gram is not None:
        assert moments.gram.dtype == torch.float32
        np.testing.assert_allclose(moments.gram, x.T @ x, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("parts", [[30], [1, 29], [10, 0, 20], [7, 7, 7, 9]])
def test_tokens_may_come_in_any_parts(parts, gram):
    x = tokens(30)
    moments = Moments.zeros(5, gram=gram)
    for part in np.split(x, np.cumsum(parts)[:-1]):
        moments = moments.accumulate(torch.from_numpy(part)[None])
    assert_moments_of(moments, x)
    assert (moments.gram is not None) == gram


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES)
@pytest.mark.parametrize(("count", "width"), [(400, 5), (1300, 3), (9, 60_000)])
def test_tokens_of_any_type_are_summed_wide(dtype, rtol, atol, count, width):
    """However many of them are added up at once: 512 of narrow ones, four of very wide ones."""
    x = torch.from_numpy(np.fmod(tokens(count, width), 7)).to(dtype)
    assert_moments_of(Moments.zeros(width, gram=False).accumulate(x), x.double().numpy(), rtol, atol)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES[1:])
def test_grams_of_half_precision_tokens_are_summed_wide(dtype, rtol, atol):
    x = torch.from_numpy(tokens(400)).to(dtype)
    assert_moments_of(Moments.zeros(5, gram=True).accumulate(x), x.double().numpy(), rtol, atol)


def test_active_means_beyond_the_threshold():
    x = torch.tensor([[0.0, 1e-6, -1e-6, 1.1e-6, -1.0]], dtype=torch.float64)
    assert Moments.zeros(5, gram=False).accumulate(x).active.tolist() == [0, 0, 0, 1, 1]


def test_moments_add():
    a, b = tokens(11, seed=1), tokens(19, seed=2)
    first, second = (Moments.zeros(5, gram=True).accumulate(torch.from_numpy(x)) for x in (a, b))
    assert_moments_of(first + second, np.concatenate([a, b]))
    assert_moments_of(first, a)
    assert_moments_of(sum_folds((first, second, first)), np.concatenate([a, b, a]))
    assert sum_folds((first,)) is first
    vectors = Moments.zeros(5, gram=False).accumulate(torch.from_numpy(b))
    assert (first + vectors).gram is None
    assert (vectors + first).gram is None


def test_what_follows_from_the_sums():
    x = tokens(50)
    moments = Moments.zeros(5, gram=True).accumulate(torch.from_numpy(x))
    x = x.astype(np.float64)
    np.testing.assert_allclose(moments.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.energy, (x**2).mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, x.var(0), rtol=1e-10)
    assert moments.width == 5


def test_variance_is_never_negative():
    x = torch.full((1000, 1), 1e6 + 0.1, dtype=torch.float64)
    assert Moments.zeros(1, gram=False).accumulate(x).variance.item() >= 0


@pytest.mark.parametrize("width", [1, 2, 7])
def test_packing_keeps_every_entry_of_a_symmetric_matrix(width):
    gram = torch.arange(width * width, dtype=torch.float32).view(width, width)
    gram = gram + gram.T
    packed = pack_symmetric(gram)
    assert packed.tolist() == [gram[i, j].item() for i in range(width) for j in range(i, width)]
    assert torch.equal(unpack_symmetric(packed, width), gram)


@settings(max_examples=60)
@given(st.integers(1, 300), st.data())
def test_folds_are_contiguous_complete_and_nearly_equal(windows, data):
    folds = data.draw(st.integers(1, windows))
    runs = [list(range(windows))[s] for s in split_folds(windows, folds)]
    assert [i for run in runs for i in run] == list(range(windows))
    sizes = [len(run) for run in runs]
    assert len(sizes) == folds
    assert max(sizes) - min(sizes) <= 1
