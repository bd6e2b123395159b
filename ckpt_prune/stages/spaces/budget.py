"""Widths of many sites within one budget, so that the total predicted error is least. Pure functions.

Every site has an error for each number of units dropped, and a cost for a unit. Choosing one width for each site under
a bound on the total cost is a multiple-choice knapsack. With few combinations it is solved exactly. Else its Lagrangian
relaxation is solved (Everett 1963): along the lower convex hulls of all sites, the steepest fall of error per cost
comes first. Further steps, and exchanges between two sites, then use up the rest of the budget (this project).
"""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, isnan, lcm, prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ckpt_prune.common.errors import UserError

K = TypeVar("K", bound=Hashable)
Array = NDArray[np.float64]

MOST_COMBINATIONS = 50_000
"""Up to so many combinations of widths, without those of the site with most choices, all are tried."""
ROUNDING = 1e-6
"""A fall between neighbours up to this share of the largest error counts as rounding of float32 moments."""
NEARBY = 8
"""Exchanges look at so many widths on either side of a site's own, besides the next hull vertices."""
ROUNDS = 64
"""Largest number of exchanges."""


class BudgetError(UserError):
    """Even the smallest widths, whose cost is `least`, cost more than the budget."""

    def __init__(self, budget: float, least: float):
        super().__init__(
            f"a budget of {_exact(budget)} is out of reach: the smallest widths that are allowed take {_exact(least)}; "
            "ask for that or more"
        )
        self.least = least


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
    def choices(self) -> "_Choices":
        """The allowed widths, with the cost and the error of each."""
        widths = np.arange(self.multiple_of, self.units + 1, self.multiple_of)
        if not len(widths) or widths[-1] != self.units:
            widths = np.append(widths, self.units)
        # Both solvers rest on this: wider is never worse. It only levels out rounding.
        rising = np.maximum.accumulate(self.values)
        return _Choices(widths, widths.astype(np.float64) * self.unit_cost, rising[self.units - widths])


@dataclass(frozen=True, eq=False)
class _Choices:
    """Widths that a site may have, with their costs, ascending, and errors, never rising, (n,) each.

    For sites that cross, widths are combinations, each as one number (`Crossing.choices`).
    """

    widths: NDArray[np.int64]
    costs: Array
    errors: Array

    def __len__(self) -> int:
        return len(self.widths)

    @cached_property
    def hull(self) -> NDArray[np.int64]:
        """Indices of the choices on the lower convex hull of error over cost (Andrew 1979), first and last included.

        Points on an edge stay in the hull: shorter segments leave less of a budget unused.
        """
        costs, errors = self.costs.tolist(), self.errors.tolist()
        vertices, worths = [0], [float("inf")]
        for new in range(1, len(costs)):
            while True:
                last = vertices[-1]
                worth = (errors[last] - errors[new]) / (costs[new] - costs[last])
                if worth <= worths[-1]:
                    break
                vertices.pop()
                worths.pop()
            vertices.append(new)
            worths.append(worth)
        return np.array(vertices)

    @cached_property
    def steps(self) -> Array:
        return np.diff(self.costs[self.hull])

    @cached_property
    def worths(self) -> Array:
        """Fall of the error per cost along each segment of the hull, (h - 1,), never rising."""
        return -np.diff(self.errors[self.hull]) / self.steps


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

    def choices(self, curves: Mapping[K, Curve]) -> "_Choices":
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
            combined = combined * (curves[site].units + 1) + site_choices[site].widths[at]
            costs = costs + site_choices[site].costs[at]
        gone = {site: curves[site].units - site_choices[site].widths[at] for site, at in grid.items()}
        for sites, common in self.shared.items():
            # Inclusion and exclusion: pairs are taken off twice, and triples then once too seldom.
            costs = costs + (-1) ** len(sites) * common * prod(gone[site] for site in sites)
        shares = {site: site_choices[site].widths[at] / curves[site].units for site, at in grid.items()}
        errors = self.error({site: site_choices[site].errors[at] for site, at in grid.items()}, shares).ravel()
        costs, combined = costs.ravel(), combined.ravel()
        # By cost, of equal costs the least error first. Nothing dropped stays, whatever else is free of error.
        order = np.lexsort((-combined, errors, costs))
        falls = errors[order] < np.minimum.accumulate(np.concatenate([[np.inf], errors[order][:-1]]))
        order = order[falls | (order == combined.size - 1)]
        return _Choices(combined[order], costs[order], np.minimum.accumulate(errors[order]))

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
    if isnan(budget):
        raise ValueError("the budget is not a number")
    crossed = [key for crossing in crossings for key in crossing.sites]
    if len(set(crossed)) < len(crossed):
        raise ValueError("a site is in one crossing at the most")
    together = {crossing.sites[0]: crossing for crossing in crossings}
    keys = [key for key in curves if key in together or key not in crossed]
    choices = [together[key].choices(curves) if key in together else curves[key].choices for key in keys]
    least = float(sum(c.costs[0] for c in choices))
    if least > budget:
        raise BudgetError(budget, least)
    if sum(c.costs[-1] for c in choices) <= budget:
        return {key: int(curve.choices.widths[-1]) for key, curve in curves.items()}
    most = max(range(len(choices)), key=lambda site: (len(choices[site]), site))
    combinations = prod(len(c) for site, c in enumerate(choices) if site != most)
    at = _enumerate(choices, most, budget) if combinations <= MOST_COMBINATIONS else _relax(choices, budget)
    widths: dict[K, int] = {}
    for key, c, index in zip(keys, choices, at, strict=True):
        width = int(c.widths[index])
        widths |= together[key].split(width, curves) if key in together else {key: width}
    return {key: widths[key] for key in curves}


def _enumerate(choices: Sequence[_Choices], last: int, budget: float) -> list[int]:
    """Try every combination of the other sites, with the widest `last` that fits; return the index of each choice."""
    others = [site for site in range(len(choices)) if site != last]
    spent, error = np.zeros(1), np.zeros(1)
    # From wide to narrow, so that the first of equal errors is the widest in the earlier sites.
    for site in others:
        spent = np.add.outer(spent, choices[site].costs[::-1]).ravel()
        error = np.add.outer(error, choices[site].errors[::-1]).ravel()
    widest = np.searchsorted(choices[last].costs, budget - spent, side="right") - 1
    best = int(np.where(widest < 0, np.inf, error + choices[last].errors[widest]).argmin())
    at = [int(widest[best])] * len(choices)
    for site, narrower in zip(others, np.unravel_index(best, [len(choices[site]) for site in others]), strict=True):
        at[site] = len(choices[site]) - 1 - int(narrower)
    return at


def _relax(choices: Sequence[_Choices], budget: float) -> list[int]:
    """Return the index of each site's choice: along the steepest segments of all hulls, then as the budget allows."""
    vertices = _steepest(choices, budget)
    _fill(choices, vertices, budget)
    at = _at_vertices(choices, vertices)
    _exchange(choices, at, budget)
    return at


def _steepest(choices: Sequence[_Choices], budget: float) -> list[int]:
    """Return the hull vertex of each site after taking segments, steepest first, until one does not fit."""
    owners = np.concatenate([np.full(len(c.steps), site) for site, c in enumerate(choices)])
    # Worths never rise along a hull and the sort is stable, so the segments of a site are taken in their order.
    order = np.argsort(-np.concatenate([c.worths for c in choices]), kind="stable")
    spent = np.cumsum(np.concatenate([c.steps for c in choices])[order])
    fit = int(np.searchsorted(spent, _slack(choices, [0] * len(choices), budget), side="right"))
    return [int(vertex) for vertex in np.bincount(owners[order[:fit]], minlength=len(choices))]


def _fill(choices: Sequence[_Choices], vertices: list[int], budget: float) -> None:
    """Move on, in place, along the steepest segments that still fit."""
    slack = _slack(choices, _at_vertices(choices, vertices), budget)
    waiting: list[tuple[float, int]] = []

    def wait(site: int) -> None:
        if vertices[site] < len(choices[site].steps):
            heapq.heappush(waiting, (-float(choices[site].worths[vertices[site]]), site))

    for site in range(len(choices)):
        wait(site)
    while waiting:
        _, site = heapq.heappop(waiting)
        step = float(choices[site].steps[vertices[site]])
        # A step that does not fit now never will, since the slack only shrinks.
        if step > slack:
            continue
        slack -= step
        vertices[site] += 1
        wait(site)


def _exchange(choices: Sequence[_Choices], at: list[int], budget: float) -> None:
    """Narrow one site a little and give another the widest choice that then fits, in place, as long as that helps."""
    for _ in range(ROUNDS):
        slack = _slack(choices, at, budget)
        sites = list(zip(choices, at, (_nearby(c, here) for c, here in zip(choices, at, strict=True)), strict=True))
        movers = np.concatenate([np.full(len(near), site) for site, (_, _, near) in enumerate(sites)])
        moves = np.concatenate([near for _, _, near in sites])
        freed = np.concatenate([c.costs[here] - c.costs[near] for c, here, near in sites])
        risen = np.concatenate([c.errors[near] - c.errors[here] for c, here, near in sites])
        # A smaller gain is rounding, which must not keep two sites exchanging.
        least = -1e-12 * sum(abs(float(c.errors[here])) for c, here, _ in sites)
        exchange = None
        for site, (c, here, _) in enumerate(sites):
            # Where a site is its own partner no other site moves: it takes what is left of the budget by itself.
            partner = movers != site
            widest = np.searchsorted(c.costs, c.costs[here] + slack + partner * freed, side="right") - 1
            change = np.where(widest < 0, np.inf, partner * risen + c.errors[widest] - c.errors[here])
            best = int(change.argmin())
            if change[best] < least:
                least, exchange = float(change[best]), (int(movers[best]), int(moves[best]), site, int(widest[best]))
        if exchange is None:
            return
        mover, moved, site, taken = exchange
        at[mover] = moved
        at[site] = taken


def _nearby(c: _Choices, here: int) -> NDArray[np.int64]:
    """Return indices of the choices close to `here` and of the hull vertices before and after it, without `here`."""
    before = max(0, int(np.searchsorted(c.hull, here, side="left")) - 1)
    after = min(len(c.hull) - 1, int(np.searchsorted(c.hull, here, side="right")))
    close = set(range(max(0, here - NEARBY), min(len(c), here + NEARBY + 1)))
    return np.array(sorted((close | {int(c.hull[before]), int(c.hull[after])}) - {here}), dtype=np.int64)


def _at_vertices(choices: Sequence[_Choices], vertices: Sequence[int]) -> list[int]:
    return [int(c.hull[vertex]) for c, vertex in zip(choices, vertices, strict=True)]


def _slack(choices: Sequence[_Choices], at: Sequence[int], budget: float) -> float:
    return budget - float(sum(c.costs[here] for c, here in zip(choices, at, strict=True)))


def _exact(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.15g}"
