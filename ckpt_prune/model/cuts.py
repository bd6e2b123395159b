"""Which rows and columns of a block's tensors remain when units go, by the incidences of spaces.

Rows and columns are counted in the dense model, where spaces that cross on one tensor do not disturb each other. A
tensor that is cut already is found by the positions of its lines among those that remain.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ckpt_prune.model.family import Family
from ckpt_prune.model.spaces import Axis, Dimension, Incidence, Kind, SpaceName, axis_dim

KeptUnits = Mapping[SpaceName, Tensor]
"""Space → units of its site that stay, ascending int64."""
RemainingLines = dict[tuple[str, int], tuple[Axis, Tensor]]
"""(linear module or table, dimension) → the axis that this is, and the dense model's lines that remain, ascending."""


def remaining_lines(
    family: Family, dimension: Dimension, kept: KeptUnits, sizes: Mapping[str, tuple[int, ...]]
) -> RemainingLines:
    """Return what remains of every linear module and table of a block that loses units.

    Args:
        dimension: of the dense model.
        kept: spaces that are pruned; others stay whole.
        sizes: linear module, or table → shape of its weight in the dense model.
    """
    masks: dict[tuple[str, int], tuple[Axis, Tensor]] = {}
    for name, units in kept.items():
        space = family.spaces[name]
        count = space.site_units(dimension)
        is_gone = torch.ones(count, dtype=torch.bool)
        is_gone[units.cpu()] = False
        dropped = is_gone.nonzero().flatten()
        tables: list[tuple[Axis, Incidence]] = [("table", table) for table in space.tables]
        for axis, incidence in [*space.incidences, *tables]:
            size = sizes[incidence.module]
            place = (incidence.module, incidence.table_dim(len(size)) if axis == "table" else axis_dim(axis))
            if place not in masks:
                masks[place] = axis, torch.ones(size[place[1]], dtype=torch.bool)
            masks[place][1][incidence.lines(dropped, count, dimension)] = False
    return {place: (axis, mask.nonzero().flatten()) for place, (axis, mask) in masks.items()}


def positions_among(lines: Tensor, others: Tensor) -> Tensor:
    """Return the positions of ascending lines among ascending others that contain all of them."""
    return torch.searchsorted(others, lines)


def list_cuts(remaining: RemainingLines) -> Iterable[tuple[str, Kind, int, Tensor]]:
    """Yield every tensor that loses lines: module, kind, dimension and the dense lines that remain.

    A bias loses the rows of its weight.
    """
    for (module, dim), (axis, lines) in remaining.items():
        yield module, "itself" if axis == "table" else "weight", dim, lines
        if axis == "rows":
            yield module, "bias", 0, lines
