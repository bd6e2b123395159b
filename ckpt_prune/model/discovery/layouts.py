"""Where the units of a space lie on an axis, said with the names of dimensions, so that it holds for any sizes."""

from collections.abc import Mapping
from itertools import combinations
from math import prod
from typing import Any

from torch import Tensor

_MOST_FACTORS = 3
_CONSTANTS = (1, 2, 3, 4)


def find_incidences(module: str, owner: Tensor, count: int, named: Mapping[str, int]) -> list[dict[str, Any]] | None:
    """Return the incidences of a description for units on an axis; None if they lie in no way that one can say.

    Args:
        owner: the unit of each line, int64; −1 for lines of no unit.
        count: units in all.
        named: dimension → size in this model.
    """
    runs = [_runs(owner, unit) for unit in range(count)]
    if not runs or not runs[0] or any(len(each) != len(runs[0]) for each in runs):
        return None
    found: list[tuple[int, int, int]] = []  # start, length and stride of each run
    for place, (start, length) in enumerate(runs[0]):
        stride = runs[1][place][0] - start if count > 1 else length
        if any(runs[unit][place] != (start + unit * stride, length) for unit in range(count)):
            return None
        found.append((start, length, stride))
    incidences, products = [], _products(named)
    while found:
        start, length, stride = found[0]
        copies = 1
        while (start + copies * stride * count, length, stride) in found:
            copies += 1
        found = [
            each for each in found if each not in [(start + c * stride * count, length, stride) for c in range(copies)]
        ]
        # A unit's lines are of two sizes if they are no product: of names, and none of the number of units.
        names = {name: size for name, size in named.items() if size != count}
        within = {
            size: factors for size, factors in _products(names).items() if factors and isinstance(factors[-1], str)
        }
        parts = (length,) if length in products else _addends_of(length, within)
        if not parts:
            return None
        for part in parts:
            of = products if len(parts) == 1 else within
            after, between = _sum(start, of), _sum(stride, of) if stride != part else []
            if after is None or between is None:
                return None
            incidence: dict[str, Any] = {
                "module": module,
                "lines_per_unit": of[part],
                "copies": copies,
                "after": after,
                "stride": between,
            }
            incidences.append({key: value for key, value in incidence.items() if value and value != 1})
            start += part
    return incidences


def _runs(owner: Tensor, unit: int) -> list[tuple[int, int]]:
    """Return (start, length) of the neighbouring lines of a unit."""
    lines = (owner == unit).nonzero().flatten().tolist()
    runs: list[tuple[int, int]] = []
    for line in lines:
        if runs and sum(runs[-1]) == line:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((line, 1))
    return runs


def factors_of(size: int, named: Mapping[str, int]) -> list[str | int]:
    """Return dimensions, and perhaps a number, whose product is a size; the size itself if there are none."""
    return _products(named).get(size, [size])


def _products(named: Mapping[str, int]) -> dict[int, list[str | int]]:
    """Return size → factors of a product that has it, the shortest product first."""
    found: dict[int, list[str | int]] = {}
    names = list(named)
    for constant in _CONSTANTS:  # names first: a number may be one of them by accident
        for several in range(_MOST_FACTORS + 1):
            for chosen in combinations(names, several):
                factors: list[str | int] = [*([constant] if constant > 1 else []), *chosen]
                found.setdefault(constant * prod(named[name] for name in chosen), factors)
    return found


def _sum(size: int, products: Mapping[int, list[str | int]]) -> list[list[str | int]] | None:
    """Return products that add up to a size; none for zero."""
    if size == 0:
        return []
    return [products[each] for each in _addends_of(size, products)] or None


def _addends_of(size: int, of: Mapping[int, Any]) -> tuple[int, ...]:
    """Return one or two of these sizes that add up to a size; none if there are none."""
    if size in of:
        return (size,)
    return next(((first, size - first) for first in of if 0 < first < size and size - first in of), ())
