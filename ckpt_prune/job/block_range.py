"""Ranges of blocks as recipes write them: A:B, in numbers of blocks or shares of the depth."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.ratios import parse_percentage

_ROUNDING = (ROUND_CEILING, ROUND_FLOOR)
"""Of a share at the start and at the end of a range: only blocks that are within it as a whole are."""


def checked_range(value: str | None) -> str | None:
    """A range as it is, or None.

    Raises:
        ValueError: it is none.
    """
    if value is not None:
        _bounds(value)
    return value


def blocks_of(text: str | None, count: int) -> range:
    """The blocks that a range names.

    Args:
        text: "A:B", each a number of blocks, a percentage of the depth, or left out; None for all.
        count: blocks of the model.

    Raises:
        UserError: there are none, or the range goes beyond the last block.
    """
    if text is None:
        return range(count)
    ends = []
    for bound, default, rounding in zip(_bounds(text), (0, count), _ROUNDING, strict=True):
        if isinstance(bound, float):
            ends.append(int((Decimal(repr(bound)) * count).to_integral_value(rounding)))
        else:
            ends.append(default if bound is None else bound)
    found = range(*ends)
    if not found or found.stop > count:
        raise UserError(f"layers {text}: the model has blocks 0 to {count - 1}, say 0:{count} for all")
    return found


def _bounds(text: str) -> list[int | float | None]:
    parts = [part.strip() for part in text.split(":")]
    found: list[int | float | None] = []
    for part in parts:
        share = parse_percentage(part)
        if share is not None and 0 <= share <= 1:
            found.append(share)
        elif part.isascii() and (part.isdigit() or not part):
            found.append(int(part) if part else None)
    if len(parts) != 2 or len(found) != 2:
        raise ValueError(f"{text!r} is not a range of blocks: say A:B, such as 0:4, 4: or :4")
    return found
