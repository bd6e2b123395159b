"""Ratios of blocks of the least predicted divergence under one share of zeros. Pure functions."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import sqrt

from ckpt_prune.stages.spaces.budget import Curve, least_error

STEPS = 200
"""Parts of a block's weights that a ratio counts in."""

Points = Sequence[tuple[float, float]]
"""Measured (ratio, divergence) of one block, ascending from the least ratio above 0."""


def divergence_at(points: Points, ratio: float) -> float:
    """The divergence between measured ones: its root is taken as linear between them, and as 0 where nothing goes.

    Beyond the last point the last slope goes on.
    """
    known = [(0.0, 0.0), *((at, sqrt(max(value, 0.0))) for at, value in points)]
    right = min(max(bisect_right([at for at, _ in known], ratio), 1), len(known) - 1)
    (a, low), (b, high) = known[right - 1], known[right]
    return float((low + (high - low) * (ratio - a) / (b - a)) ** 2)


def least_divergence(curves: Sequence[Points], sizes: Sequence[int], ratio: float, spread: float) -> list[float]:
    """Ratios of blocks whose predicted divergences have the least sum (`budget.least_error`).

    Args:
        ratio: of all weights together, which the result meets exactly.
        spread: no block's ratio is further from that.

    Returns:
        Ratio of every block.
    """
    least, most = (round(STEPS * each) for each in (max(0.0, ratio - spread), min(1.0, ratio + spread)))
    most = min(most, STEPS - 1)
    # Kept parts count from the fewest that are allowed; one more stands for these.
    own: Mapping[int, Curve] = {
        block: Curve(_rising([divergence_at(points, step / STEPS) for step in range(least, most + 2)]), float(size))
        for block, (points, size) in enumerate(zip(curves, sizes, strict=True))
    }
    fewest = STEPS - most - 1
    budget = STEPS * (1 - ratio) * sum(sizes) - fewest * sum(sizes)
    kept = least_error(own, budget + 1e-6 * sum(sizes))
    found = [1 - (fewest + kept[block]) / STEPS for block in own]
    # Less than one part of a block is left over: all blocks share it.
    over = sum(share * size for share, size in zip(found, sizes, strict=True)) / sum(sizes) - ratio
    return [min(max(share - over, 0.0), 1 - 1 / STEPS) for share in found]


def least_divergence_in_groups(curves: Sequence[Sequence[float]], sizes: Sequence[int], kept: int) -> list[int]:
    """N of every block's N:M of the least predicted divergence, whose mean over weights is no more than a pattern's.

    Args:
        curves: of every block, the divergence with 0, 1, … M − 1 of M weights zero.
        kept: N of the pattern of the whole.
    """
    # With all weights zero: no block may have that, and least_error keeps one unit at the least.
    own = {
        block: Curve(_rising([*values, values[-1]]), float(size))
        for block, (values, size) in enumerate(zip(curves, sizes, strict=True))
    }
    found = least_error(own, float(kept * sum(sizes)))
    return [found[block] for block in own]


def _rising(values: Sequence[float]) -> list[float]:
    """More zeros never harm less: what says otherwise is chance."""
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1] if found else value))
    return found
