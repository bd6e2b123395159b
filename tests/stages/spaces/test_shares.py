"""Counts of units and the ratios that give them, against every count tried."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_prune.scoring.selection import units_kept
from ckpt_prune.stages.spaces.ratio_gaps import Gap, allowed_widths, gap, ratio_for

ROUNDINGS = st.sampled_from(["floor", "ceil", "nearest"])
UNITS, MULTIPLES = st.integers(1, 3000), st.sampled_from([1, 2, 8, 64, 4000])


def reachable(units, rounding, multiple_of):
    """Every width that some ratio of two or three digits leaves."""
    widths = set()
    for thousandth in range(1000):
        try:
            widths.add(units_kept(units, thousandth / 1000, rounding, multiple_of))
        except Exception:  # nothing would stay
            continue
    return widths


@pytest.mark.parametrize(("units", "multiple_of"), [(1, 1), (3, 1), (22, 1), (22, 4), (24, 8), (5, 8)])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "nearest"])
def test_the_widths_there_are_are_those_that_ratios_leave(units, multiple_of, rounding):
    assert allowed_widths(units, multiple_of) == sorted(reachable(units, rounding, multiple_of))


@given(UNITS, ROUNDINGS, MULTIPLES, st.data())
def test_a_ratio_leaves_just_what_it_is_for(units, rounding, multiple_of, data):
    kept = data.draw(st.sampled_from(allowed_widths(units, multiple_of)))
    ratio = ratio_for(units, kept, rounding, multiple_of)
    assert units_kept(units, ratio, rounding, multiple_of) == kept
    assert abs(Fraction(ratio) - Fraction(units - kept, units)) <= Fraction(1, 100)


def test_a_ratio_is_as_short_as_can_be():
    assert [ratio_for(3, kept, "floor") for kept in (3, 2, 1)] == [0.0, 0.34, 0.67]
    assert [ratio_for(8, kept, "floor") for kept in (7, 6, 4)] == [0.13, 0.25, 0.5]
    assert (ratio_for(688, 405, "ceil"), ratio_for(688, 405, "floor")) == (0.41, 0.412)
    with pytest.raises(ValueError, match="no ratio leaves 5 of 24 units in multiples of 8"):
        ratio_for(24, 5, "floor", 8)


@pytest.mark.parametrize(
    ("units", "ratio", "rounding", "multiple_of", "expected"),
    [
        (2, 0.3, "floor", 1, Gap(0.3, 0, 1, 0.5)),
        (3, 0.2, "floor", 1, Gap(0.2, 0, 1, 0.34)),
        (3, 0.5, "floor", 1, Gap(0.5, 1, 2, 0.67)),
        (8, 0.2, "floor", 1, Gap(0.2, 1, 2, 0.25)),
        (4, 0.3, "ceil", 1, Gap(0.3, 2, 1, 0.25)),
        (4, 0.1, "ceil", 1, Gap(0.1, 1, 0, 0.0)),
        (1, 0.2, "floor", 1, Gap(0.2, 0, None, None)),
        (2, 0.9, "floor", 1, Gap(0.9, 1, None, None)),
        (24, 0.3, "ceil", 8, Gap(0.3, 8, 0, 0.0)),
    ],
)
def test_what_is_too_coarse_is_told_with_the_size_beside_it(units, ratio, rounding, multiple_of, expected):
    assert gap(units, ratio, rounding, multiple_of) == expected
