"""Ratios and the counts of units that they leave: which widths exist, and how far a ratio misses."""

from dataclasses import dataclass

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.ratios import is_far
from ckpt_prune.model.spaces import Counting
from ckpt_prune.scoring.selection import units_kept

_DIGITS = 12


def allowed_widths(units: int, multiple_of: int = 1) -> list[int]:
    """Return the widths that a space of so many units may have, ascending: the multiples, and the full width."""
    multiples = list(range(multiple_of, units + 1, multiple_of))
    return multiples if multiples and multiples[-1] == units else [*multiples, units]


def ratio_for(units: int, kept: int, rounding: Counting, multiple_of: int = 1) -> float:
    """Return the shortest ratio of two digits or more that leaves exactly `kept` units, one of `allowed_widths`.

    `rounding` and `multiple_of` are as in `selection.units_kept`. ValueError if no ratio leaves that many.
    """
    share = (units - kept) / units
    for digits in range(2, _DIGITS + 1):
        # The nearest of so many digits, and those on either side: counts may be rounded down or up.
        for aside in (0.0, 0.5, -0.5):
            ratio = round(share + aside * 10.0**-digits, digits)
            if 0 <= ratio < 1 and _try_keep(units, ratio, rounding, multiple_of) == kept:
                return ratio
    raise ValueError(f"no ratio leaves {kept} of {units} units in multiples of {multiple_of}")


def _try_keep(units: int, ratio: float, rounding: Counting, multiple_of: int) -> int | None:
    try:
        return units_kept(units, ratio, rounding, multiple_of)
    except UserError:
        return None


@dataclass(frozen=True)
class Gap:
    """A ratio that the units of a space are too coarse for.

    Attributes:
        asked: share of units to drop.
        dropped: units that go.
        other: units that go at the next size on the other side of the ratio; None if there is none.
        ratio: the shortest that drops `other`.
    """

    asked: float
    dropped: int
    other: int | None
    ratio: float | None


def gap(units: int, asked: float, rounding: Counting, multiple_of: int = 1) -> Gap | None:
    """Return what is reached, and the next size beside it, if that is far from a ratio; None if it is near."""
    kept = units_kept(units, asked, rounding, multiple_of)
    dropped = units - kept
    if not is_far(asked, dropped / units):
        return None
    allowed = allowed_widths(units, multiple_of)
    index = allowed.index(kept) + (1 if dropped / units > asked else -1)
    if not 0 <= index < len(allowed):
        return Gap(asked, dropped, None, None)
    other = allowed[index]
    return Gap(asked, dropped, units - other, ratio_for(units, other, rounding, multiple_of))
