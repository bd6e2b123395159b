"""One choice for each of several sites, under a bound on their sum. Pure functions.

A site is anything that has choices with a cost each and an error each: a width of a space, a type of a matrix, both at
once. Choosing one for each site under a bound on the total cost is a multiple-choice knapsack. With few combinations it
is solved exactly. Else its Lagrangian relaxation is solved (Everett 1963): along the lower convex hulls of all sites,
the steepest fall of error per cost comes first. Further steps, and exchanges between two sites, then use up the rest of
the budget (this project).
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan, prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckpt_prune.common.errors import UserError

Array = NDArray[np.float64]
B = TypeVar("B")
C = TypeVar("C")

MOST_COMBINATIONS = 50_000
"""Up to so many combinations of choices, without those of the site with most, all are tried."""
NEARBY = 8
"""Exchanges look at so many choices on either side of a site's own, besides the next hull vertices."""
ROUNDS = 64
"""Largest number of exchanges."""


class BudgetError(UserError):
    """Even the cheapest choices, whose cost is `least`, cost more than the budget."""

    def __init__(self, budget: float, least: float):
        super().__init__(
            f"a budget of {_exact(budget)} is out of reach: the smallest choices that are allowed take "
            f"{_exact(least)}; ask for that or more"
        )
        self.least = least


def solve_each(solve: Callable[[B], C], budgets: Iterable[B], failed: list[BudgetError]) -> list[C]:
    """Return what `solve` chooses for each budget that can be kept to, and add the errors of the others to `failed`."""
    found = []
    for budget in budgets:
        try:
            found.append(solve(budget))
        except BudgetError as error:
            failed.append(error)
    return found


@dataclass(frozen=True, eq=False)
class Choices:
    """The choices of a site, by cost: costs rise and errors fall or stay, (n,) each.

    Attributes:
        labels: a sequence that says what each choice is, such as a width or a type, (n,).
    """

    labels: Any
    costs: Array
    errors: Array

    @classmethod
    def of(cls, choices: Iterable[tuple[Any, float, float]]) -> "Choices":
        """Sort choices, (label, cost, error) each, and leave out those that another beats at its cost."""
        kept: list[tuple[Any, float, float]] = []
        for choice in sorted(choices, key=lambda choice: choice[1:]):
            if not kept or choice[2] < kept[-1][2]:
                kept.append(choice)
        labels, costs, errors = zip(*kept, strict=True)
        return cls(labels, np.array(costs, np.float64), np.array(errors, np.float64))

    def __len__(self) -> int:
        return len(self.labels)

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


def spend(choices: Sequence[Choices], budget: float) -> list[int]:
    """Return the index of each site's choice, of least total error at a total cost within the budget.

    The result is exact if the choices of all sites but the one with most make at most `MOST_COMBINATIONS`. Else the
    error exceeds the least possible by no more than one segment of a site's lower convex hull is worth. Of equal errors
    dearer choices of earlier sites win; the site with most choices counts as the last.

    Raises:
        BudgetError: the cheapest choices cost more.
    """
    if isnan(budget):
        raise ValueError("the budget is not a number")
    least = float(sum(c.costs[0] for c in choices))
    if least > budget:
        raise BudgetError(budget, least)
    if sum(c.costs[-1] for c in choices) <= budget:
        return [len(c) - 1 for c in choices]
    most = max(range(len(choices)), key=lambda site: (len(choices[site]), site))
    combinations = prod(len(c) for site, c in enumerate(choices) if site != most)
    return _enumerate(choices, most, budget) if combinations <= MOST_COMBINATIONS else _relax(choices, budget)


def save(choices: Sequence[Choices], allowed: float) -> list[int]:
    """Return the index of each site's choice, of least total cost at a total error of at most `allowed`.

    It is `spend` with costs and errors exchanged, so no two choices of a site have one error (`Choices.of`).

    Raises:
        BudgetError: the best choices lose more.
    """
    turned = [Choices(range(len(c)), c.errors[::-1], c.costs[::-1]) for c in choices]
    return [len(c) - 1 - at for c, at in zip(choices, spend(turned, allowed), strict=True)]


def _enumerate(choices: Sequence[Choices], last: int, budget: float) -> list[int]:
    """Try every combination of the other sites, with the dearest `last` that fits; return the index of each choice."""
    others = [site for site in range(len(choices)) if site != last]
    spent, error = np.zeros(1), np.zeros(1)
    # From dear to cheap, so that the first of equal errors is the dearest in the earlier sites.
    for site in others:
        spent = np.add.outer(spent, choices[site].costs[::-1]).ravel()
        error = np.add.outer(error, choices[site].errors[::-1]).ravel()
    dearest = np.searchsorted(choices[last].costs, budget - spent, side="right") - 1
    best = int(np.where(dearest < 0, np.inf, error + choices[last].errors[dearest]).argmin())
    at = [int(dearest[best])] * len(choices)
    for site, cheaper in zip(others, np.unravel_index(best, [len(choices[site]) for site in others]), strict=True):
        at[site] = len(choices[site]) - 1 - int(cheaper)
    return at


def _relax(choices: Sequence[Choices], budget: float) -> list[int]:
    """Return the index of each site's choice: along the steepest segments of all hulls, then as the budget allows."""
    vertices = _steepest(choices, budget)
    _fill(choices, vertices, budget)
    at = _at_vertices(choices, vertices)
    _exchange(choices, at, budget)
    return at


def _steepest(choices: Sequence[Choices], budget: float) -> list[int]:
    """Return the hull vertex of each site after taking segments, steepest first, until one does not fit."""
    owners = np.concatenate([np.full(len(c.steps), site) for site, c in enumerate(choices)])
    # Worths never rise along a hull and the sort is stable, so the segments of a site are taken in their order.
    order = np.argsort(-np.concatenate([c.worths for c in choices]), kind="stable")
    spent = np.cumsum(np.concatenate([c.steps for c in choices])[order])
    fit = int(np.searchsorted(spent, _slack(choices, [0] * len(choices), budget), side="right"))
    return [int(vertex) for vertex in np.bincount(owners[order[:fit]], minlength=len(choices))]


def _fill(choices: Sequence[Choices], vertices: list[int], budget: float) -> None:
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


def _exchange(choices: Sequence[Choices], at: list[int], budget: float) -> None:
    """Make one site a little cheaper and give another the dearest choice that then fits, in place, while that helps."""
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
            # A site that is its own partner takes what is left of the budget, and no other site moves.
            partner = movers != site
            dearest = np.searchsorted(c.costs, c.costs[here] + slack + partner * freed, side="right") - 1
            change = np.where(dearest < 0, np.inf, partner * risen + c.errors[dearest] - c.errors[here])
            best = int(change.argmin())
            if change[best] < least:
                least, exchange = float(change[best]), (int(movers[best]), int(moves[best]), site, int(dearest[best]))
        if exchange is None:
            return
        mover, moved, site, taken = exchange
        at[mover] = moved
        at[site] = taken


def _nearby(c: Choices, here: int) -> NDArray[np.int64]:
    """Return indices of the choices close to `here` and of the hull vertices before and after it, without `here`."""
    before = max(0, int(np.searchsorted(c.hull, here, side="left")) - 1)
    after = min(len(c.hull) - 1, int(np.searchsorted(c.hull, here, side="right")))
    close = set(range(max(0, here - NEARBY), min(len(c), here + NEARBY + 1)))
    return np.array(sorted((close | {int(c.hull[before]), int(c.hull[after])}) - {here}), dtype=np.int64)


def _at_vertices(choices: Sequence[Choices], vertices: Sequence[int]) -> list[int]:
    return [int(c.hull[vertex]) for c, vertex in zip(choices, vertices, strict=True)]


def _slack(choices: Sequence[Choices], at: Sequence[int], budget: float) -> float:
    return budget - float(sum(c.costs[here] for c, here in zip(choices, at, strict=True)))


def _exact(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.15g}"
