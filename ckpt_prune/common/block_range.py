"""Blocks as recipes write them: numbers, or a range A:B in numbers of blocks or shares of the depth."""

from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from itertools import pairwise

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.ratios import parse_percentage


def checked_blocks(value: list[int] | None) -> list[int] | None:
    """Return numbers of blocks as they are; raise ValueError if one is below 0 or there twice."""
    if value is not None and (min(value) < 0 or len(set(value)) < len(value)):
        raise ValueError("numbers of blocks, each once, counted from 0")
    return value


def checked_range(value: str | None) -> str | None:
    """Return a range as it is; raise ValueError if it is none."""
    if value is not None:
        _bounds(value)
    return value


def blocks_of(text: str | None, count: int) -> range:
    """Return the blocks that a range names, in a model of `count` blocks.

    The range is "A:B", each a number of blocks, a percentage of the depth, or left out; None means all. With
    percentages, only blocks that lie in the range as a whole are in it.
    """
    if text is None:
        return range(count)
    ends = []
    for bound, default, rounding in zip(_bounds(text), (0, count), (ROUND_CEILING, ROUND_FLOOR), strict=True):
        if isinstance(bound, float):
            ends.append(int((Decimal(repr(bound)) * count).to_integral_value(rounding)))
        else:
            ends.append(default if bound is None else bound)
    blocks = range(*ends)
    if not blocks or blocks.stop > count:
        raise UserError(f"layers {text}: the model has blocks 0 to {count - 1}, say 0:{count} for all")
    return blocks


def runs_of(blocks: Sequence[int]) -> list[range]:
    """Ascending blocks as runs of consecutive ones."""
    breaks = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(blocks)) if b != a + 1), len(blocks)]
    return [range(blocks[start], blocks[stop - 1] + 1) for start, stop in pairwise(breaks) if stop > start]


def _bounds(text: str) -> list[int | float | None]:
    bounds: list[int | float | None] = []
    parts = [part.strip() for part in text.split(":")]
    for part in parts:
        share = parse_percentage(part)
        if share is not None and 0 <= share <= 1:
            bounds.append(share)
        elif part.isascii() and (part.isdigit() or not part):
            bounds.append(int(part) if part else None)
    if len(parts) != 2 or len(bounds) != 2:
        raise ValueError(f"{text!r} is not a range of blocks: say A:B, such as 0:4, 4: or :4")
    return bounds
