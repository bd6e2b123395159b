"""How far two results of one computation are apart: pure functions of tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-3
"""Share of the largest reference element: relative differences of smaller elements are taken relative to it instead,
since an element that is zero but for rounding has no meaningful relative difference."""
CHUNK = 1 << 22
"""Elements compared at a time, in float64."""


@dataclass(frozen=True)
class Difference:
    """One tensor beside its reference; figures are over all positions and units."""

    max_abs: float
    """Infinite where one side is not a finite number and the other is not equal to it."""
    mean_abs: float
    max_rel: float
    """Of |a − b| / max(|b|, `FLOOR` × `largest`), b being the reference."""
    mean_rel: float
    largest: float
    """Largest finite |b|."""
    agreement: float | None
    """Share of positions whose largest unit is the same on both sides; None where units are no classes."""
    worst: tuple[int, int]
    """Position and unit of the largest difference."""


def positions(values: Tensor, keep: Tensor | None = None) -> Tensor:
    """A result as (positions, units), only those that count.

    Args:
        values: (B, ...), or (B, T, ...) with `keep`.
        keep: bool (B, T), false where a token is padding.

    Returns:
        (N, units): row by row of the batch, and token by token with `keep`. What has no units has one.
    """
    rows = values if keep is None else values[keep]
    return rows.reshape(len(rows), -1)


def difference(ours: Tensor, theirs: Tensor, *, classes: bool = False) -> Difference:
    """Compare (N, units) with a reference of the same shape, in float64.

    Equal infinities are no difference. A NaN is one, also where both have it.

    Args:
        ours: what is looked at.
        theirs: the reference.
        classes: the units are classes or tokens, of which the largest counts.

    Raises:
        ValueError: the shapes differ, or there is nothing in them.
    """
    if ours.shape != theirs.shape or ours.dim() != 2 or ours.numel() == 0:
        raise ValueError(f"cannot compare {list(ours.shape)} with {list(theirs.shape)}")
    largest = max(_largest_finite(part) for _, part in _chunks(theirs))
    most, most_rel, total, total_rel, same = -1.0, 0.0, 0.0, 0.0, 0
    worst = (0, 0)
    for start, part in _chunks(theirs):
        expected = part.double()
        given = ours[start : start + len(part)].double()
        apart = torch.where(given == expected, 0.0, (given - expected).abs()).nan_to_num(math.inf, math.inf)
        # A difference of zero is none, whatever it is relative to: the floor is zero where the reference is.
        relative = torch.where(apart == 0, 0.0, apart / expected.abs().clamp_min(FLOOR * largest))
        relative = relative.nan_to_num(math.inf, math.inf)
        place = int(apart.argmax())
        if (here := apart.flatten()[place].item()) > most:
            most, worst = here, (start + place // part.shape[1], place % part.shape[1])
        most_rel = max(most_rel, relative.max().item())
        total, total_rel = total + apart.sum().item(), total_rel + relative.sum().item()
        same += int((given.argmax(1) == expected.argmax(1)).sum()) if classes else 0
    count = theirs.numel()
    agreement = same / len(theirs) if classes else None
    return Difference(most, total / count, most_rel, total_rel / count, largest, agreement, worst)


def _chunks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Runs of rows, each with the number of its first."""
    rows = max(1, CHUNK // values.shape[1])
    for start in range(0, len(values), rows):
        yield start, values[start : start + rows]


def _largest_finite(values: Tensor) -> float:
    finite = torch.where(values.isfinite(), values.double().abs(), 0.0)
    return finite.max().item()
