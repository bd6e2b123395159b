"""Zeros shared out over blocks, held against the papers' formulae."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.zero_patterns import GroupPattern
from ckpt_prune.sparsity.allocation import (
    BINS,
    check_ratios,
    hill_exponent,
    outlier_ratio,
    ratios_by_exponents,
    ratios_by_outliers,
    whole_groups,
)
from ckpt_prune.stages.mask.shares import divergence_at, least_divergence, least_divergence_in_groups
from tests.oracles import mask_shares as oracle

SEVERAL = st.lists(st.floats(0.1, 9), min_size=2, max_size=9).filter(lambda values: max(values) - min(values) > 1e-3)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_outliers_equal_the_oracle():
    scores = [normal(8, 6).exp(), normal(5, 7, seed=1).exp() * 3]
    for threshold in (1.0, 2.0, 5.0):
        expected = oracle.outlier_ratio([matrix.numpy() for matrix in scores], threshold)
        assert outlier_ratio(scores, threshold) == pytest.approx(expected, rel=1e-12)
    assert outlier_ratio(scores, 1.0) > outlier_ratio(scores, 3.0) > 0


@pytest.mark.parametrize("shape", [(30, 30), (20, 50), (50, 20)])
def test_exponents_equal_the_oracle(shape):
    weight = normal(*shape) * torch.linspace(0.1, 3, shape[1], dtype=torch.float64)
    assert hill_exponent(weight) == pytest.approx(oracle.hill(weight.numpy(), BINS), rel=1e-9)
    assert hill_exponent(weight * 7) == pytest.approx(hill_exponent(weight), rel=1e-6)


def test_exponents_where_there_is_no_tail():
    assert hill_exponent(torch.zeros(4, 4)) == hill_exponent(torch.eye(5)) == math.inf
    low_rank = normal(12, 3) @ normal(3, 12, seed=1)
    assert 1 < hill_exponent(low_rank) < math.inf


@settings(deadline=None, max_examples=25)
@given(values=SEVERAL, ratio=st.floats(0.3, 0.7), spread=st.floats(0.01, 0.1))
def test_outliers_share_out_the_ratio(values, ratio, spread):
    ratios = ratios_by_outliers(values, [7] * len(values), ratio, spread)
    assert ratios == pytest.approx(oracle.owl(values, ratio, spread))
    assert np.mean(ratios) == pytest.approx(ratio)
    uneven = ratios_by_outliers(values, sizes := [*range(1, len(values) + 1)], ratio, spread)
    assert np.dot(uneven, sizes) == pytest.approx(ratio * sum(sizes))
    assert np.diff(uneven) == pytest.approx(np.diff(ratios))
    assert max(ratios) - min(ratios) == pytest.approx(2 * spread)
    # Values that differ by their last digit may come to the same.
    assert ratios[values.index(max(values))] == min(ratios)


@settings(deadline=None, max_examples=25)
@given(values=SEVERAL, ratio=st.floats(0.3, 0.7), spread=st.floats(0.01, 0.3), data=st.data())
def test_exponents_share_out_the_ratio(values, ratio, spread, data):
    sizes = data.draw(st.lists(st.integers(1, 99), min_size=len(values), max_size=len(values)))
    ratios = ratios_by_exponents(values, sizes, ratio, spread)
    assert ratios == pytest.approx(oracle.alpha(values, sizes, ratio, spread))
    assert np.dot(ratios, sizes) == pytest.approx(ratio * sum(sizes))
    assert max(ratios) / min(ratios) == pytest.approx((1 + spread) / (1 - spread))
    assert ratios[values.index(max(values))] == max(ratios)


@pytest.mark.parametrize(("ratios", "block"), [([0.5, 1.02], 1), ([-0.01, 0.9], 0)])
def test_shares_that_no_mask_has(ratios, block):
    with pytest.raises(UserError, match=f"would zero .* of block {block}: say a smaller mask.spread") as error:
        check_ratios(ratios, "owl", 0.3)
    assert "\n" not in str(error.value)


@settings(deadline=None, max_examples=30)
@given(
    ratios=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    pattern=st.sampled_from([GroupPattern(2, 4), GroupPattern(4, 8), GroupPattern(1, 4)]),
)
def test_groups_add_up_to_the_pattern(ratios, pattern):
    kept = whole_groups(ratios, pattern)
    assert sum(kept) == pattern.kept * len(ratios)
    assert all(1 <= count <= pattern.of for count in kept)


def test_groups_are_rounded_to_the_largest_remainders():
    assert whole_groups([0.5, 0.5], GroupPattern(2, 4)) == [2, 2]
    assert whole_groups([0.4, 0.45, 0.65], GroupPattern(4, 8)) == [5, 4, 3]


def curves(blocks: int, seed: int) -> list[list[tuple[float, float]]]:
    generator = np.random.default_rng(seed)
    at = (0.25, 0.5, 0.75, 0.9)
    return [list(zip(at, np.sort(generator.exponential(size=len(at))), strict=True)) for _ in range(blocks)]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    ratio=st.floats(0.2, 0.8),
    spread=st.floats(0.02, 0.15),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6),
)
def test_least_divergence_meets_the_ratio_within_its_spread(seed, ratio, spread, sizes):
    measured = curves(len(sizes), seed)
    ratios = least_divergence(measured, sizes, ratio, spread)
    assert np.dot(ratios, sizes) == pytest.approx(ratio * sum(sizes), abs=1e-9)
    assert all(abs(share - ratio) <= spread + 0.01 for share in ratios)
    even = sum(divergence_at(points, ratio) for points in measured)
    # Parts of half a percent are what it is exact to.
    assert sum(divergence_at(p, r) for p, r in zip(measured, ratios, strict=True)) <= even * 1.02


def test_divergence_between_measured_shares():
    points = [(0.5, 0.04), (0.7, 0.16)]
    divergences = [divergence_at(points, share) for share in (0.0, 0.25, 0.5, 0.6, 0.7, 0.8)]
    assert divergences == pytest.approx([0.0, 0.01, 0.04, 0.09, 0.16, 0.25])


@settings(deadline=None, max_examples=25)
@given(
    values=st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4).map(sorted), min_size=2, max_size=5),
    kept=st.integers(1, 4),
)
def test_groups_of_the_least_divergence(values, kept):
    """Exact: every way to share them out was tried."""
    counts = least_divergence_in_groups(values, [1] * len(values), kept)
    assert sum(counts) <= kept * len(values)
    assert all(1 <= count <= 4 for count in counts)
    total = sum(curve[4 - n] for curve, n in zip(values, counts, strict=True))
    assert total == pytest.approx(oracle.least(values, kept), abs=1e-9)


def test_blocks_that_are_alike_get_the_same():
    assert ratios_by_outliers([2.0, 2.0], [1, 4], 0.5, 0.08) == pytest.approx([0.5, 0.5])
    assert ratios_by_exponents([3.0, 3.0], [1, 4], 0.5, 0.3) == pytest.approx([0.5, 0.5])
