from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import masks as oracle

from ckpt_prune.common.zero_patterns import GroupPattern
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.sparsity.masks import keep_groups, keep_share, magnitude, wanda, zeros_of


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def moments_of(tokens: torch.Tensor) -> Moments:
    return Moments.zeros(tokens.shape[1], gram=False).accumulate(tokens)


@given(total=st.integers(0, 10**9), thousandths=st.integers(0, 1000))
def test_a_share_is_taken_as_it_is_written(total, thousandths):
    assert zeros_of(total, thousandths / 1000) == int(Fraction(thousandths, 1000) * total)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_share_beyond_all_is_refused(ratio):
    with pytest.raises(ValueError, match="lies between 0 and 1"):
        zeros_of(10, ratio)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_are_those_of_the_definitions(dtype):
    weight, tokens = normal(5, 12, dtype=dtype), normal(30, 12, seed=1)
    tokens[:, 3] = 0
    for scores, expected in [
        (magnitude(weight), oracle.magnitude(weight)),
        (wanda(weight, moments_of(tokens)), oracle.wanda(weight, tokens)),
    ]:
        assert scores.dtype == torch.float64
        torch.testing.assert_close(scores, expected, rtol=1e-6 if dtype != torch.float64 else 1e-7, atol=0)


def test_moments_of_another_width_are_refused():
    with pytest.raises(ValueError, match="moments of width 1 do not fit a weight of 12 inputs"):
        wanda(normal(5, 12), moments_of(normal(30, 1)))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 6), groups=st.integers(1, 4), hundredths=st.integers(0, 100))
def test_masks_are_those_of_the_oracle(seed, rows, groups, hundredths):
    weight, tokens, ratio = normal(rows, 8 * groups, seed=seed), normal(20, 8 * groups, seed=seed + 1), hundredths / 100
    scored = [
        (magnitude(weight), oracle.magnitude(weight)),
        (wanda(weight, moments_of(tokens)), oracle.wanda(weight, tokens)),
    ]
    for ours, theirs in scored:
        per_row, overall = hundredths * 8 * groups // 100, hundredths * 8 * groups * rows // 100
        assert torch.equal(keep_share(ours, ratio, "row"), oracle.drop_in_rows(theirs, per_row))
        assert torch.equal(keep_share(ours, ratio, "matrix"), oracle.drop_in_matrix(theirs, overall))
        for n, m in [(2, 4), (4, 8), (1, 4), (3, 8), (1, 2)]:
            assert torch.equal(keep_groups(ours, GroupPattern(n, m)), oracle.drop_in_groups(theirs, n, m))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), levels=st.integers(1, 4), hundredths=st.integers(0, 100))
def test_ties_and_counts_are_those_of_the_oracle(seed, levels, hundredths):
    """Scores of few distinct values: nearly every cut falls among equals."""
    scores = torch.randint(levels, (5, 24), generator=torch.Generator().manual_seed(seed)).double()
    ratio = hundredths / 100
    per_row, overall = 24 * hundredths // 100, 120 * hundredths // 100
    by_row, by_matrix = keep_share(scores, ratio, "row"), keep_share(scores, ratio, "matrix")
    assert ((~by_row).sum(1) == per_row).all()
    assert int((~by_matrix).sum()) == overall
    assert torch.equal(by_row, oracle.drop_in_rows(scores, per_row))
    assert torch.equal(by_matrix, oracle.drop_in_matrix(scores, overall))
    for n, m in [(2, 4), (4, 8), (1, 12)]:
        mask = keep_groups(scores, GroupPattern(n, m))
        assert (mask.view(5, -1, m).sum(2) == n).all()
        assert torch.equal(mask, oracle.drop_in_groups(scores, n, m))


def test_among_equals_the_lower_index_stays():
    scores = torch.zeros(2, 4, dtype=torch.float64)
    yes, no = True, False
    assert keep_share(scores, 0.25, "row").tolist() == [[yes, yes, yes, no]] * 2
    assert keep_share(scores, 0.25, "matrix").tolist() == [[yes] * 4, [yes, yes, no, no]]
    assert keep_groups(scores, GroupPattern(1, 2)).tolist() == [[yes, no, yes, no]] * 2


def test_among_many_equals_too():
    """Short sorts are stable by accident."""
    scores = torch.zeros(3, 1000, dtype=torch.float64)
    mask = keep_share(scores, 0.3, "row")
    assert mask[:, :700].all()
    assert not mask[:, 700:].any()
    wide = keep_groups(torch.zeros(200, 32, dtype=torch.float64), GroupPattern(5, 32))
    assert wide[:, :5].all()
    assert not wide[:, 5:].any()


@pytest.mark.parametrize("compare", ["row", "matrix"])
def test_nothing_and_everything(compare):
    scores = normal(3, 5)
    assert keep_share(scores, 0.0, compare).all()
    assert not keep_share(scores, 1.0, compare).any()


def test_a_width_that_groups_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="pattern 2:4 needs a width divisible by 4, and 10 is not"):
        keep_groups(normal(2, 10), GroupPattern(2, 4))


def test_a_score_that_is_no_number_is_refused():
    scores = normal(2, 8)
    scores[1, 3] = float("nan")
    with pytest.raises(ValueError, match="not a number"):
        keep_share(scores, 0.5, "row")
    with pytest.raises(ValueError, match="not a number"):
        keep_groups(scores, GroupPattern(2, 4))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("levels", [3, 10**9], ids=["ties", "hardly any ties"])
def test_a_gpu_gives_the_same_masks(levels):
    scores = torch.randint(levels, (300, 512), generator=torch.Generator().manual_seed(0)).double()
    for compare in ("row", "matrix"):
        assert torch.equal(keep_share(scores.cuda(), 0.37, compare).cpu(), keep_share(scores, 0.37, compare))
    pattern = GroupPattern(4, 8)
    assert torch.equal(keep_groups(scores.cuda(), pattern).cpu(), keep_groups(scores, pattern))
