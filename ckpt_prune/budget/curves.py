"""Widths of many sites within one budget, so that the total predicted error is least. Pure functions.

Every site has an error for each number of units dropped, and a cost for a unit: its widths are its choices.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, lcm, prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ckpt_prune.budget.choices import Array, Choices, spend

K = TypeVar("K", bound=Hashable)

ROUNDING = 1e-6
"""A fall between neighbours up to this share of the largest error counts as rounding of float32 moments."""


@dataclass(frozen=True, eq=False)
class Curve:
    """The predicted error of one site for every number of units dropped, and the cost of a unit.

    Attributes:
        errors: predicted error with k units dropped, (units + 1,) of any float dtype, never decreasing.
        unit_cost: parameters, bytes or FLOPs that go with one unit. Costs are compared in float64, which is exact for
            whole numbers up to 2**53.
        multiple_of: allowed widths are its multiples from 1 on, and the full width.
    """

    errors: Tensor | Sequence[float]
    unit_cost: float
    multiple_of: int = 1

    def __post_init__(self) -> None:
        values = self.values
        if values.ndim != 1 or len(values) < 2:
            raise ValueError(f"a curve has an error for 0, 1, ... units dropped, not shape {values.shape}")
        if not np.isfinite(values).all():
            raise ValueError("an error of a curve is not finite")
        falls = np.diff(values) < -ROUNDING * np.abs(values).max()
        if falls.any():
            raise ValueError(f"errors never decrease, but from {int(falls.argmax())} units dropped to one more they do")
        if not (isfinite(self.unit_cost) and self.unit_cost > 0):
            raise ValueError(f"the cost of a unit is positive and finite, not {self.unit_cost:g}")
        if self.multiple_of < 1:
            raise ValueError(f"multiple_of is at least 1, not {self.multiple_of}")

    @cached_property
    def values(self) -> Array:
        """A copy of `errors` as they were when the curve was made, float64 on the CPU."""
        if isinstance(self.errors, Tensor):
            return self.errors.detach().to("cpu", torch.float64).numpy().copy()
        return np.array(self.errors, dtype=np.float64)

    @property
    def units(self) -> int:
        return len(self.values) - 1

    def error(self, kept: int) -> float:
        """Return the predicted error with `kept` units left."""
        if not 0 <= kept <= self.units:
            raise ValueError(f"{kept} units cannot be kept of {self.units}")
        return float(self.values[self.units - kept])

    @cached_property
    def choices(self) -> Choices:
        """The allowed widths, with the cost and the error of each."""
        widths = np.arange(self.multiple_of, self.units + 1, self.multiple_of)
        if not len(widths) or widths[-1] != self.units:
            widths = np.append(widths, self.units)
        # Both solvers rest on this: wider is never worse. It only levels out rounding.
        rising = np.maximum.accumulate(self.values)
        return Choices(widths, widths.astype(np.float64) * self.unit_cost, rising[self.units - widths])


def merge_curves(curves: Sequence[Curve]) -> Curve:
    """Return the curve of sites that share one width: errors and unit costs are the sums of theirs.

    A width is allowed if every site allows it.
    """
    units = sorted({curve.units for curve in curves})
    if len(units) != 1:
        raise ValueError(f"curves that share a width have the same number of units, not {units}")
    errors = np.sum([curve.values for curve in curves], axis=0)
    cost = sum(curve.unit_cost for curve in curves)
    return Curve(torch.from_numpy(errors), cost, lcm(*(curve.multiple_of for curve in curves)))


@dataclass(frozen=True)
class Crossing(Generic[K]):
    """Sites whose units cross on the same tensors: those of one stand inside those of another, as many in each.

    So a unit saves less if units of the others go, and an error inside a unit that goes counts nothing.

    Attributes:
        inside: pairs of sites; units of the first stand inside units of the second.
        shared: two sites or more → what one unit of each has in common: their costs count it more than once.
    """

    inside: Sequence[tuple[K, K]]
    shared: Mapping[tuple[K, ...], float]

    @property
    def sites(self) -> tuple[K, ...]:
        """All of them, once each, in order of first appearance."""
        return tuple(dict.fromkeys(site for pair in self.inside for site in pair))

    def error(self, errors: Mapping[K, Any], shares: Mapping[K, Any]) -> Any:
        """Return what all sites lose together, from what each loses by itself and the share of its units that stays."""
        for site, own in shares.items():
            errors = {key: error * own if (key, site) in self.inside else error for key, error in errors.items()}
        return sum(errors.values())

    def choices(self, curves: Mapping[K, Curve]) -> Choices:
        """Return combinations of widths, each as one number (`split`), without those that another beats at its cost."""
        site_choices = {site: curves[site].choices for site in self.sites}
        grid = dict(
            zip(
                site_choices,
                np.meshgrid(*(np.arange(len(each)) for each in site_choices.values()), indexing="ij"),
                strict=True,
            )
        )
        combined, costs = np.zeros(1, np.int64), np.zeros(1)
        for site, at in grid.items():
            combined = combined * (curves[site].units + 1) + site_choices[site].labels[at]
            costs = costs + site_choices[site].costs[at]
        gone = {site: curves[site].units - site_choices[site].labels[at] for site, at in grid.items()}
        for sites, common in self.shared.items():
            # Inclusion and exclusion: pairs are taken off twice, and triples then once too seldom.
            costs = costs + (-1) ** len(sites) * common * prod(gone[site] for site in sites)
        shares = {site: site_choices[site].labels[at] / curves[site].units for site, at in grid.items()}
        errors = self.error({site: site_choices[site].errors[at] for site, at in grid.items()}, shares).ravel()
        costs, combined = costs.ravel(), combined.ravel()
        # By cost, of equal costs the least error first. Nothing dropped stays, whatever else is free of error.
        order = np.lexsort((-combined, errors, costs))
        falls = errors[order] < np.minimum.accumulate(np.concatenate([[np.inf], errors[order][:-1]]))
        order = order[falls | (order == combined.size - 1)]
        return Choices(combined[order], costs[order], np.minimum.accumulate(errors[order]))

    def split(self, combined: int, curves: Mapping[K, Curve]) -> dict[K, int]:
        """Return the widths of a combination."""
        widths: dict[K, int] = {}
        for site in reversed(self.sites):
            combined, widths[site] = divmod(combined, curves[site].units + 1)
        return widths


def total_error(curves: Mapping[K, Curve], kept: Mapping[K, int], crossings: Sequence[Crossing[K]] = ()) -> float:
    """Return what sites are predicted to lose together at `kept` units, counted as in `least_error`."""
    errors = {key: curve.error(kept[key]) for key, curve in curves.items()}
    crossed = [site for crossing in crossings for site in crossing.sites]
    together = (
        crossing.error(
            {site: errors[site] for site in crossing.sites},
            {site: kept[site] / curves[site].units for site in crossing.sites},
        )
        for crossing in crossings
    )
    return float(sum(together) + sum(error for key, error in errors.items() if key not in crossed))


def least_error(curves: Mapping[K, Curve], budget: float, crossings: Sequence[Crossing[K]] = ()) -> dict[K, int]:
    """Return site → units kept, with total cost within the budget and least total error.

    The result is exact if the widths of all sites but the one with most choices make at most `MOST_COMBINATIONS`
    combinations. Two spaces that each have one width for the whole model always do. Else the error exceeds the least
    possible by no more than one segment of a site's lower convex hull is worth.

    The result is deterministic. Of equal errors earlier keys win, and among combinations wider widths. The site with
    most choices counts as the last. If everything fits, nothing is dropped; if not even the smallest widths do, that is
    a `BudgetError`.

    Args:
        curves: site → its curve.
        budget: for Σ kept · unit_cost, in the units of `unit_cost`, and what crossings make up for.
        crossings: no site in two of them. The sites of one count as one, that of its first key.
    """
    crossed = [key for crossing in crossings for key in crossing.sites]
    if len(set(crossed)) < len(crossed):
        raise ValueError("a site is in one crossing at the most")
    together = {crossing.sites[0]: crossing for crossing in crossings}
    keys = [key for key in curves if key in together or key not in crossed]
    choices = [together[key].choices(curves) if key in together else curves[key].choices for key in keys]
    widths: dict[K, int] = {}
    for key, c, index in zip(keys, choices, spend(choices, budget), strict=True):
        width = int(c.labels[index])
        widths |= together[key].split(width, curves) if key in together else {key: width}
    return {key: widths[key] for key in curves}
