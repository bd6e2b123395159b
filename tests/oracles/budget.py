"""Widths under a budget by trying everything, and by an exact dynamic programme: whole costs, plain loops."""

import itertools
from fractions import Fraction
from typing import NamedTuple


class Site(NamedTuple):
    errors: list[int]
    """With 0, 1, ... units dropped."""
    cost: int
    multiple: int = 1


def widths(site: Site) -> list[int]:
    """Kept counts allowed."""
    units = len(site.errors) - 1
    return [kept for kept in range(1, units + 1) if kept % site.multiple == 0 or kept == units]


def error(site: Site, kept: int) -> int:
    return site.errors[len(site.errors) - 1 - kept]


def brute_force(sites: list[Site], budget: int) -> int | None:
    """Least total error of all combinations that fit; None where none does."""
    fitting = [
        sum(error(site, kept) for site, kept in zip(sites, combination, strict=True))
        for combination in itertools.product(*map(widths, sites))
        if sum(site.cost * kept for site, kept in zip(sites, combination, strict=True)) <= budget
    ]
    return min(fitting, default=None)


def dynamic_programme(sites: list[Site], budget: int) -> int | None:
    """The same by the least error for every total cost, site by site."""
    least = {0: 0}
    for site in sites:
        after: dict[int, int] = {}
        for spent, total in least.items():
            for kept in widths(site):
                cost, new = spent + site.cost * kept, total + error(site, kept)
                if cost <= budget and new < after.get(cost, new + 1):
                    after[cost] = new
        least = after
    return min(least.values(), default=None)


class Segment(NamedTuple):
    worth: Fraction
    """Fall of the error per cost."""
    site: int
    cost: int
    gain: int


def hull_segments(sites: list[Site]) -> list[Segment]:
    """All segments of the sites' lower convex hulls, the steepest first, ties by site, then from narrow to wide."""
    segments = []
    for index, site in enumerate(sites):
        allowed = widths(site)
        here = 0
        while here < len(allowed) - 1:
            # The nearest of the steepest: points on an edge are vertices too.
            worth, back = max(
                (
                    Fraction(
                        error(site, allowed[here]) - error(site, allowed[there]),
                        site.cost * (allowed[there] - allowed[here]),
                    ),
                    -there,
                )
                for there in range(here + 1, len(allowed))
            )
            cost = site.cost * (allowed[-back] - allowed[here])
            segments.append(Segment(worth, index, cost, int(worth * cost)))
            here = -back
    return sorted(segments, key=lambda segment: (-segment.worth, segment.site))


class Crossed(NamedTuple):
    """A block whose inner units stand in its outer ones: it costs outer · (each · inner + alone) + own · inner."""

    inner: list[int]
    """Errors with 0, 1, ... inner units dropped of every outer one."""
    outer: list[int]
    each: int
    alone: int
    own: int = 0
    multiple: int = 1
    """Of inner units."""

    @property
    def inner_widths(self) -> list[int]:
        return widths(Site(self.inner, 1, self.multiple))

    def cost(self, inner: int, outer: int) -> int:
        return outer * (self.each * inner + self.alone) + self.own * inner

    def error(self, inner: int, outer: int) -> Fraction:
        """An error inside an outer unit that goes is none."""
        units = len(self.outer) - 1
        return Fraction(outer, units) * self.inner[len(self.inner) - 1 - inner] + self.outer[units - outer]


def brute_force_crossed(blocks: list[Crossed], others: list[Site], budget: int) -> Fraction | None:
    """Least total error of all widths that fit, of crossed pairs and of sites that cross nothing."""
    pairs = [
        [(block.cost(q, h), block.error(q, h)) for q in block.inner_widths for h in range(1, len(block.outer))]
        for block in blocks
    ]
    alone = [[(site.cost * kept, Fraction(error(site, kept))) for kept in widths(site)] for site in others]
    fitting = [
        sum((worth for _, worth in chosen), Fraction())
        for chosen in itertools.product(*pairs, *alone)
        if sum(cost for cost, _ in chosen) <= budget
    ]
    return min(fitting, default=None)
