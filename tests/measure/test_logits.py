import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.measure.moments.logits import LogitMoments, choose_form, packed_positions, packed_width
from tests.oracles import logits as oracle

HEADS, DIM = 3, 4
FORMS = ("per-sample", "fourth-order")


def projections(samples: int, tokens: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (samples, tokens, heads * d), with means as biases give them."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(samples, tokens, HEADS * DIM, generator=g) + torch.arange(HEADS * DIM) / 8 for _ in "qk")


def of_head(projection: torch.Tensor, sample: int, head: int) -> np.ndarray:
    return projection[sample, :, head * DIM : (head + 1) * DIM].double().numpy()


def pack_upper_half(matrix: np.ndarray) -> list[float]:
    return [matrix[i, j] for i in range(len(matrix)) for j in range(i, len(matrix))]


def packed_grams(projection: torch.Tensor) -> np.ndarray:
    """(H, N, p) by loops."""
    grams = [
        [pack_upper_half(of_head(projection, b, h).T @ of_head(projection, b, h)) for b in range(len(projection))]
        for h in range(HEADS)
    ]
    return np.array(grams).reshape(HEADS, len(projection), packed_width(DIM))


def assert_moments_of(moments: LogitMoments, queries: torch.Tensor, keys: torch.Tensor) -> None:
    assert (moments.samples, moments.tokens) == (queries.shape[0], queries.shape[0] * queries.shape[1])
    assert (moments.heads, moments.head_dim) == (HEADS, DIM)
    query_grams, key_grams = packed_grams(queries), packed_grams(keys)
    if moments.form == "per-sample":
        assert moments.fourth is None
        for packed, expected in ((moments.queries, query_grams), (moments.keys, key_grams)):
            assert packed.dtype == torch.float32
            assert packed.is_contiguous()
            np.testing.assert_allclose(packed, expected, rtol=1e-5, atol=1e-4)
    else:
        assert moments.queries is None
        assert moments.keys is None
        assert moments.fourth.dtype == torch.float32
        expected = np.zeros((HEADS, packed_width(DIM), packed_width(DIM)))
        for h, b in itertools.product(range(HEADS), range(len(queries))):
            expected[h] += np.outer(query_grams[h, b], key_grams[h, b])
        np.testing.assert_allclose(moments.fourth, expected, rtol=1e-5, atol=1e-2)


def measure_moments(form: str, queries: torch.Tensor, keys: torch.Tensor) -> LogitMoments:
    return LogitMoments.zeros(HEADS, DIM, form=form).accumulate(queries, keys)


@pytest.mark.parametrize("dims", [1, 2, 5])
def test_positions_of_a_packed_triangle(dims):
    positions = packed_positions(dims)
    assert pack_upper_half(positions.numpy()) == list(range(packed_width(dims)))
    assert torch.equal(positions, positions.T)


@settings(max_examples=40)
@given(st.integers(1, 5000), st.integers(1, 128))
def test_the_smaller_form_is_the_smaller(samples, head_dim):
    p = len(range(head_dim)) * (head_dim + 1) // 2
    floats = {"per-sample": 2 * samples * p, "fourth-order": p * p}
    chosen = choose_form(samples, head_dim)
    assert floats[chosen] == min(floats.values())
    if len(set(floats.values())) == 1:
        assert chosen == "per-sample"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parts", [[9], [1, 8], [4, 0, 5], [3, 3, 3]])
def test_samples_may_come_in_any_batches(parts, form):
    queries, keys = projections(9)
    moments = LogitMoments.zeros(HEADS, DIM, form=form)
    for q, k in zip(queries.split(parts), keys.split(parts), strict=True):
        moments = moments.accumulate(q, k)
    assert moments.form == form
    assert_moments_of(moments, queries, keys)


def test_a_sample_is_not_spread_over_batches_of_tokens():
    """Windows of other lengths are samples of their own."""
    long, short = projections(2, tokens=7), projections(3, tokens=2, seed=1)
    moments = measure_moments("per-sample", *long).accumulate(*short)
    assert (moments.samples, moments.tokens) == (5, 2 * 7 + 3 * 2)
    expected = np.concatenate([packed_grams(long[0]), packed_grams(short[0])], axis=1)
    np.testing.assert_allclose(moments.queries, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_wide(dtype, form):
    queries, keys = (x.to(dtype) for x in projections(40, tokens=50))
    assert_moments_of(measure_moments(form, queries, keys), queries, keys)


def test_earlier_moments_stay_as_they_were():
    queries, keys = projections(6)
    first = measure_moments("per-sample", queries[:2], keys[:2])
    second = first.accumulate(queries[2:4], keys[2:4])
    third = first.accumulate(queries[4:], keys[4:])
    assert_moments_of(second, queries[:4], keys[:4])
    assert_moments_of(third, queries[[0, 1, 4, 5]], keys[[0, 1, 4, 5]])
    assert_moments_of(first, queries[:2], keys[:2])


@pytest.mark.parametrize("more", [2, 3], ids=["still smaller per sample", "no longer"])
@pytest.mark.parametrize(("one", "other"), list(itertools.product(FORMS, FORMS)))
def test_moments_add(one, other, more):
    """With p = 10 packed numbers a Gram, 2 N p floats a head take as much room as p² at N = 5."""
    a, b = projections(3), projections(more, seed=1)
    first, second = measure_moments(one, *a), measure_moments(other, *b)
    both = first + second
    assert both.form == ("per-sample" if one == other == "per-sample" and more == 2 else "fourth-order")
    assert_moments_of(both, *(torch.cat(pair) for pair in zip(a, b, strict=True)))
    assert_moments_of(first, *a)
    assert_moments_of(second, *b)


def test_conversion_is_exact():
    queries, keys = projections(200)
    per_sample = measure_moments("per-sample", queries, keys)
    summed = per_sample.as_fourth()
    exact = per_sample.queries.double().mT @ per_sample.keys.double()
    assert torch.equal(summed.fourth, exact.float())
    assert torch.equal(per_sample.as_fourth(torch.float64).fourth, exact)
    assert summed.as_fourth() is summed
    assert_moments_of(summed, queries, keys)


@pytest.mark.parametrize("form", FORMS)
def test_no_sample_at_all(form):
    assert_moments_of(LogitMoments.zeros(HEADS, DIM, form=form), *projections(0))
    queries, keys = projections(2)
    assert_moments_of(LogitMoments.zeros(HEADS, DIM, form=form) + measure_moments(form, queries, keys), queries, keys)


def assert_same(moments: LogitMoments, expected: LogitMoments) -> None:
    assert (moments.form, moments.samples, moments.tokens) == (expected.form, expected.samples, expected.tokens)
    assert (moments.heads, moments.head_dim) == (expected.heads, expected.head_dim)
    for name in ("queries", "keys", "fourth"):
        if getattr(expected, name) is not None:
            torch.testing.assert_close(getattr(moments, name), getattr(expected, name), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_some_dimensions_or_one_head_are_as_measured_on_them(form):
    queries, keys = projections(6)
    moments = measure_moments(form, queries, keys)
    kept = torch.tensor([[0, 2], [3, 1], [2, 3]])
    columns = (kept + DIM * torch.arange(HEADS)[:, None]).flatten()
    expected = LogitMoments.zeros(HEADS, 2, form=form).accumulate(queries[..., columns], keys[..., columns])
    assert_same(moments.restrict(kept), expected)
    for head in range(HEADS):
        columns = slice(head * DIM, (head + 1) * DIM)
        expected = LogitMoments.zeros(1, DIM, form=form).accumulate(queries[..., columns], keys[..., columns])
        assert_same(moments.select_head(head), expected)


@pytest.mark.parametrize("form", FORMS)
def test_logit_energy(form):
    queries, keys = projections(7)
    energy = measure_moments(form, queries, keys).logit_energy()
    assert energy.dtype == torch.float64
    for head in range(HEADS):
        samples = [(of_head(queries, b, head), of_head(keys, b, head)) for b in range(7)]
        np.testing.assert_allclose(energy[head], oracle.logit_energy(samples), rtol=1e-5)


@pytest.mark.parametrize("parts", [{}, {"queries"}, {"queries", "fourth"}, {"queries", "keys", "fourth"}])
def test_moments_are_of_one_form(parts):
    tensors = {"queries": torch.zeros(1, 2, 3), "keys": torch.zeros(1, 2, 3), "fourth": torch.zeros(1, 3, 3)}
    with pytest.raises(ValueError, match="either"):
        LogitMoments(2, 4, 1, 2, **{name: tensors[name] for name in parts})


def test_grams_of_a_sum_are_refused():
    with pytest.raises(ValueError, match="summed"):
        LogitMoments.zeros(1, 2, form="fourth-order").grams()


# ---- centred keys --------------------------------------------------------------------------------------------------


def about_means(keys: torch.Tensor) -> torch.Tensor:
    return keys - keys.mean(1, keepdim=True)


def measure_centred_moments(form: str, queries: torch.Tensor, keys: torch.Tensor) -> LogitMoments:
    return LogitMoments.zeros(HEADS, DIM, form=form, centred=True).accumulate(queries, keys)


@pytest.mark.parametrize("form", FORMS)
def test_centred_moments_hold_both(form):
    queries, keys = projections(9)
    moments = measure_centred_moments(form, queries, keys)
    assert moments.has_centred
    assert_moments_of(moments.with_keys(centred=False), queries, keys)
    assert_moments_of(moments.with_keys(centred=True), queries, about_means(keys))
    assert not moments.with_keys(centred=True).has_centred
    bare = measure_moments(form, queries, keys)
    assert bare.with_keys(centred=False) is bare
    with pytest.raises(ValueError, match="not of centred keys"):
        bare.with_keys(centred=True)


@pytest.mark.parametrize(("one", "other"), list(itertools.product(FORMS, FORMS)))
def test_centred_moments_add_and_are_cut(one, other):
    queries, keys = projections(9)
    both = measure_centred_moments(one, queries[:4], keys[:4]) + measure_centred_moments(other, queries[4:], keys[4:])
    assert_moments_of(both.with_keys(centred=True), queries, about_means(keys))
    kept = torch.tensor([[0, 2], [1, 3], [2, 3]])
    for chosen in (both, both.as_fourth(), both.to("cpu")):
        cut, first = (
            (moments.restrict(kept), moments.select_head(1)) for moments in (chosen, chosen.with_keys(centred=True))
        )
        for ours, expected in zip(cut, first, strict=True):
            again = ours.with_keys(centred=True)
            for name in ("queries", "keys", "fourth"):
                sums, expected_sums = getattr(again, name), getattr(expected, name)
                assert (sums is None) == (expected_sums is None)
                assert sums is None or torch.equal(sums, expected_sums)
    with pytest.raises(ValueError, match="do not add to moments without"):
        both + measure_moments("per-sample", queries, keys)
    assert both.is_finite
    both.centred[0, 0, 0] = torch.nan
    assert not both.is_finite
