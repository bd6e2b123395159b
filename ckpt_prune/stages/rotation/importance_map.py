"""Where the importance of a weight lies, in few numbers: what a map of it is drawn from (DenoiseRotator, Figure 2)."""

from typing import Any

import torch
from torch import Tensor

CELLS = 24
"""Cells of a map along each side, at most."""
LARGEST = 0.01
"""Share of the weights whose share of the importance is told."""


def coarse(values: Tensor, cells: int = CELLS) -> list[list[float]]:
    """Means over cells of a matrix, as shares of the mean over all of it, to four significant digits.

    Args:
        values: (rows, columns), not negative.
        cells: along each side, at most; cells differ by one row or column at most.
    """
    wide = values.double()
    for dim in (0, 1):
        count = min(cells, wide.shape[dim])
        wide = torch.stack([part.mean(dim) for part in wide.tensor_split(count, dim)], dim)
    mean = float(values.double().mean())
    return [[float(f"{value / mean:.4g}") if mean > 0 else 0.0 for value in row] for row in wide.tolist()]


def held_by_largest(values: Tensor, share: float = LARGEST) -> float:
    """Which share of a matrix' sum its largest entries hold; 0 where that is zero.

    Args:
        values: not negative.
        share: of all entries, at least one.
    """
    flat = values.double().flatten()
    most = flat.topk(max(1, round(share * flat.numel()))).values.sum()
    total = float(flat.sum())
    return float(most) / total if total > 0 else 0.0


def importance_map(name: str, before: Tensor, after: Tensor) -> dict[str, Any]:
    """What a report says of a weight's importance, as `report.model.ImportanceMap` has it.

    Args:
        name: of the weight.
        before: importance without rotation, (rows, columns).
        after: the same of the rotated weight.
    """
    rows, columns = before.shape
    return {
        "weight": name,
        "rows": rows,
        "columns": columns,
        "before": coarse(before),
        "after": coarse(after),
        "largest_before": held_by_largest(before),
        "largest_after": held_by_largest(after),
    }
