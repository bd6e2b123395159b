"""From the incidences of spaces: which rows and columns stay, and with them shapes, cutting and padding.

Everything is counted in the rows and columns of the dense model, where spaces that cross on one tensor do not disturb
each other; a tensor that is cut already is found by the place that its lines have among those that stay.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ckpt_prune.model.family import Family
from ckpt_prune.model.spaces import Axis, Dimension, Incidence, Kind, SpaceName, axis_dim

KeptUnits = Mapping[SpaceName, Tensor]
"""Space → units of its site that stay, ascending int64."""
RemainingLines = dict[tuple[str, int], tuple[Axis, Tensor]]
"""(linear module or table, dimension) → which axis that is, and the dense model's lines that stay, ascending."""

Sizes = Mapping[str, tuple[int, ...]]
"""Name → shape."""


def remaining_lines(family: Family, dimension: Dimension, kept: KeptUnits, sizes: Sizes) -> RemainingLines:
    """What stays of every linear module of a block that loses units of some space.

    Args:
        family: whose spaces.
        dimension: of the dense model.
        kept: spaces that are pruned; others stay whole.
        sizes: linear module, or table → shape of its weight in the dense model.
    """
    masks: dict[tuple[str, int], tuple[Axis, Tensor]] = {}
    for name, units in kept.items():
        space = family.spaces[name]
        count = space.site_units(dimension)
        gone = torch.ones(count, dtype=torch.bool)
        gone[units.cpu()] = False
        dropped = gone.nonzero().flatten()
        tables: list[tuple[Axis, Incidence]] = [("table", table) for table in space.tables]
        for axis, incidence in [*space.incidences, *tables]:
            size = sizes[incidence.module]
            place = (incidence.module, len(size) - 1 if axis == "table" else axis_dim(axis))
            if place not in masks:
                masks[place] = axis, torch.ones(size[place[1]], dtype=torch.bool)
            masks[place][1][incidence.lines(dropped, count, dimension)] = False
    return {place: (axis, mask.nonzero().flatten()) for place, (axis, mask) in masks.items()}


def positions_among(lines: Tensor, others: Tensor) -> Tensor:
    """Places of ascending lines among ascending others that have all of them."""
    return torch.searchsorted(others, lines)


def list_cuts(remaining: RemainingLines) -> Iterable[tuple[str, Kind, int, Tensor]]:
    """Every tensor that loses lines: module, kind, dimension and the dense lines that stay. A bias has its rows."""
    for (module, dim), (axis, lines) in remaining.items():
        yield module, "itself" if axis == "table" else "weight", dim, lines
        if axis == "rows":
            yield module, "bias", 0, lines
