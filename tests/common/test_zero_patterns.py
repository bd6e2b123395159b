import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_prune.common.zero_patterns import MOST, GroupPattern, parse_pattern


def test_unstructured_is_no_pattern():
    assert parse_pattern("unstructured") is None


@given(of=st.integers(2, MOST), data=st.data())
def test_a_pattern_reads_back_as_written(of, data):
    kept = data.draw(st.integers(1, of - 1))
    pattern = parse_pattern(f"{kept}:{of}")
    assert pattern == GroupPattern(kept, of)
    assert str(pattern) == f"{kept}:{of}"
    assert pattern.ratio == pytest.approx((of - kept) / of)


@pytest.mark.parametrize(
    "text", ["", "2", "2:", ":4", "2:4:8", "-2:4", "2.0:4", "2 : 4", "2:4\n", "a:b", "Unstructured"]
)
def test_what_is_no_pattern_is_refused(text):
    with pytest.raises(ValueError, match="is neither unstructured nor N:M, for example 2:4"):
        parse_pattern(text)


@pytest.mark.parametrize("text", ["0:4", "4:4", "5:4", "0:0", "1:1", "2:33", "16:64"])
def test_a_pattern_that_cannot_be_meant_is_refused(text):
    with pytest.raises(ValueError, match=f"^pattern '{text}' cannot be meant: .* 1 <= N < M <= 32$"):
        parse_pattern(text)
