"""Map of where the importance of a weight lies, in few numbers (DenoiseRotator, Figure 2)."""

from typing import Any

import torch
from torch import Tensor

CELLS = 24
"""Cells of a map along each side, at most."""
LARGEST = 0.01
"""Share of the weights whose share of the importance is told."""


def cell_means(values: Tensor, cells: int = CELLS) -> list[list[float]]:
    """Return means over cells of a matrix, as shares of the mean over all of it, to four significant digits.

    There are at most `cells` along each side, which differ by one row or column at most.
    """
    wide = values.double()
    for dim in (0, 1):
        count = min(cells, wide.shape[dim])
        wide = torch.stack([part.mean(dim) for part in wide.tensor_split(count, dim)], dim)
    mean = float(values.double().mean())
    return [[float(f"{value / mean:.4g}") if mean > 0 else 0.0 for value in row] for row in wide.tolist()]


def share_of_largest(values: Tensor, share: float = LARGEST) -> float:
    """Return which share of the sum of a matrix its largest entries hold; 0 if the sum is zero.

    `share` is of all entries; at least one is taken.
    """
    flat = values.double().flatten()
    most = flat.topk(max(1, round(share * flat.numel()))).values.sum()
    total = float(flat.sum())
    return float(most) / total if total > 0 else 0.0


def importance_map(name: str, before: Tensor, after: Tensor) -> dict[str, Any]:
    """Return what the report's `ImportanceMap` holds, from importance (rows, columns) before and after rotation."""
    rows, columns = before.shape
    return {
        "weight": name,
        "rows": rows,
        "columns": columns,
        "before": cell_means(before),
        "after": cell_means(after),
        "largest_before": share_of_largest(before),
        "largest_after": share_of_largest(after),
    }
