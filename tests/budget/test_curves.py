import math
from itertools import accumulate, product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.budget import choices as module
from ckpt_prune.budget.choices import BudgetError, Choices, save, spend
from ckpt_prune.budget.curves import Crossing, Curve, least_error, merge_curves, total_error
from tests.oracles.budget import (
    Crossed,
    Site,
    brute_force,
    brute_force_crossed,
    dynamic_programme,
    error,
    hull_segments,
    widths,
)
from tests.refusals import refusal

SITES = st.lists(
    st.builds(
        lambda falls, cost, multiple: Site([0, *accumulate(falls)], cost, multiple),
        st.lists(st.integers(0, 9), min_size=1, max_size=6),
        st.integers(1, 9),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=4,
)


def solve(sites, budget, combinations=None):
    """Widths by site, as a list; `combinations` 0 never enumerates."""
    curves = {f"site {index}": Curve(site.errors, site.cost, site.multiple) for index, site in enumerate(sites)}
    with patch.object(module, "MOST_COMBINATIONS", module.MOST_COMBINATIONS if combinations is None else combinations):
        kept = least_error(curves, budget)
    assert list(kept) == list(curves)
    assert all(type(width) is int for width in kept.values())
    return list(kept.values())


def total(sites, kept):
    return sum(error(site, width) for site, width in zip(sites, kept, strict=True))


def cost(sites, kept):
    return sum(site.cost * width for site, width in zip(sites, kept, strict=True))


def extremes(sites):
    return cost(sites, [widths(s)[0] for s in sites]), cost(sites, [widths(s)[-1] for s in sites])


@settings(max_examples=40, deadline=None)
@given(SITES, st.floats(0, 1))
def test_few_combinations_are_solved_exactly(sites, share):
    least, most = extremes(sites)
    budget = least + int(share * (most - least))
    kept = solve(sites, budget)
    assert all(width in widths(site) for site, width in zip(sites, kept, strict=True))
    assert cost(sites, kept) <= budget
    assert total(sites, kept) == brute_force(sites, budget) == dynamic_programme(sites, budget)


@settings(max_examples=40, deadline=None)
@given(SITES, st.floats(0, 1))
def test_the_relaxation_is_off_by_one_segment_of_a_hull_at_most(sites, share):
    least, most = extremes(sites)
    budget = least + int(share * (most - least))
    kept = solve(sites, budget, combinations=0)
    assert all(width in widths(site) for site, width in zip(sites, kept, strict=True))
    assert cost(sites, kept) <= budget
    largest = max((segment.gain for segment in hull_segments(sites)), default=0)
    assert 0 <= total(sites, kept) - dynamic_programme(sites, budget) <= largest


@settings(max_examples=40, deadline=None)
@given(SITES, st.data())
def test_the_relaxation_is_exact_where_the_budget_is_spent_at_a_hull_vertex(sites, data):
    segments = hull_segments(sites)
    taken = data.draw(st.integers(0, len(segments)))
    budget = extremes(sites)[0] + sum(segment.cost for segment in segments[:taken])
    kept = solve(sites, budget, combinations=0)
    assert cost(sites, kept) <= budget
    assert total(sites, kept) == dynamic_programme(sites, budget)


@settings(max_examples=30, deadline=None)
@given(SITES, st.integers(0, 60), st.integers(0, 60))
def test_a_larger_budget_is_never_worse(sites, smaller, more):
    least, _ = extremes(sites)
    assert total(sites, solve(sites, least + smaller)) >= total(sites, solve(sites, least + smaller + more))


@settings(max_examples=30, deadline=None)
@given(SITES, st.sampled_from([None, 0]))
def test_where_everything_fits_nothing_is_dropped(sites, combinations):
    units = [len(site.errors) - 1 for site in sites]
    assert solve(sites, extremes(sites)[1], combinations) == units
    assert solve(sites, math.inf, combinations) == units


@settings(max_examples=30, deadline=None)
@given(SITES, st.sampled_from([None, 0]))
def test_the_smallest_widths_are_reached_and_nothing_below(sites, combinations):
    least, _ = extremes(sites)
    kept = solve(sites, least, combinations)
    assert kept == [widths(site)[0] for site in sites]
    with pytest.raises(BudgetError) as caught:
        solve(sites, least - 1, combinations)
    assert caught.value.least == least


@pytest.mark.parametrize(
    ("budget", "text"), [(35_999, "35,999"), (-7, "-7"), (0.5, "0.5"), (1234.5, "1,234.5"), (-math.inf, "-inf")]
)
def test_an_impossible_budget_names_the_smallest_size(budget, text):
    assert refusal(least_error, {"heads": Curve([0, 1, 2], 4000), "mlp": Curve(range(21), 2000, 16)}, budget) == (
        f"a budget of {text} is out of reach: the smallest choices that are allowed take 36,000; ask for that or more"
    )


def test_a_budget_is_a_number():
    with pytest.raises(ValueError, match=r"^the budget is not a number$"):
        least_error({"mlp": Curve([0, 1], 1)}, math.nan)


@pytest.mark.parametrize("combinations", [None, 0])
@pytest.mark.parametrize(
    ("units", "multiple", "reached"),
    [
        (10, 4, [4, 4, 4, 4, 8, 8, 10]),
        (8, 4, [4, 4, 4, 4, 8]),
        (3, 8, [3]),
        (3, 1, [1, 2, 3]),
    ],
)
def test_widths_are_multiples_or_whole(combinations, units, multiple, reached):
    site = Site(list(range(units + 1)), 1, multiple)
    assert [solve([site], budget, combinations) for budget in range(reached[0], units + 1)] == [[w] for w in reached]


def dual_bound(curves, budget):
    """Largest over λ ≥ 0 of Σ min over widths of error + λ cost, less λ times the budget: below every solution."""
    tables = [
        (np.array([curve.error(kept) for kept in range(1, curve.units + 1)]), np.arange(1, curve.units + 1), curve)
        for curve in curves.values()
    ]

    def dual(exponent):
        strength = math.exp(exponent)
        return (
            sum(float((errors + strength * curve.unit_cost * kept).min()) for errors, kept, curve in tables)
            - strength * budget
        )

    low, high = -30.0, 10.0
    for _ in range(120):
        third = (high - low) / 3
        if dual(low + third) < dual(high - third):
            low += third
        else:
            high -= third
    return dual(low)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95))
def test_many_wide_sites_stay_near_the_dual_bound(seed, share):
    rng = np.random.default_rng(seed)
    curves = {}
    for block in range(6):
        for space, units, unit_cost in (("heads", 8, 1900.0), ("mlp", 300, 17.0)):
            # Convex: every unit is a segment of the hull by itself.
            rises = np.sort(rng.lognormal(0, 2, units))
            curves[block, space] = Curve(torch.from_numpy(np.cumsum([0, *rises])), unit_cost)
    least = sum(curve.unit_cost for curve in curves.values())
    budget = int(least + share * (sum(c.units * c.unit_cost for c in curves.values()) - least))
    kept = least_error(curves, budget)
    spare = budget - sum(kept[key] * curve.unit_cost for key, curve in curves.items())
    assert spare >= 0
    assert spare < 17 or all(kept[block, "mlp"] == 300 for block in range(6))
    loss = sum(curve.error(kept[key]) for key, curve in curves.items())
    bound = dual_bound(curves, budget)
    largest = max(curve.error(n) - curve.error(n + 1) for curve in curves.values() for n in range(1, curve.units))
    assert bound - 1e-9 * loss <= loss <= bound + largest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0], 1), "a curve has an error for 0, 1, ... units dropped, not shape (1,)"),
        (([0.0, math.nan], 1), "an error of a curve is not finite"),
        (([0.0, 2.0, 1.999], 1), "errors never decrease, but from 1 units dropped to one more they do"),
        (([0.0, 1.0], 0), "the cost of a unit is positive and finite, not 0"),
        (([0.0, 1.0], math.nan), "the cost of a unit is positive and finite, not nan"),
        (([0.0, 1.0], 1, 0), "multiple_of is at least 1, not 0"),
    ],
)
def test_what_is_no_curve_is_refused(arguments, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        Curve(*arguments)
    assert str(caught.value) == message


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.integers(0, 80),
)
def test_sites_that_share_a_width_are_one_curve(falls, costs, multiples, budget):
    sites = [Site([0, *accumulate(f)], c, m) for f, c, m in zip(falls, costs, multiples, strict=False)]
    shared = merge_curves([Curve(s.errors, s.cost, s.multiple) for s in sites])
    common = [width for width in widths(sites[0]) if all(width in widths(site) for site in sites)]
    assert shared.unit_cost == sum(site.cost for site in sites)
    fitting = [width for width in common if width * shared.unit_cost <= budget]
    if not fitting:
        with pytest.raises(BudgetError):
            least_error({"mlp": shared}, budget)
    else:
        assert least_error({"mlp": shared}, budget) == {"mlp": max(fitting)}
        assert shared.error(max(fitting)) == sum(error(site, max(fitting)) for site in sites)


def test_sites_of_other_widths_share_none():
    with pytest.raises(ValueError, match=r"^curves that share a width have the same number of units, not \[1, 2\]$"):
        merge_curves([Curve([0, 1, 2], 1), Curve([0, 1], 1)])
    with pytest.raises(ValueError, match=r"^curves that share a width have the same number of units, not \[\]$"):
        merge_curves([])


# ---- sites that cross ------------------------------------------------------------------------------------------

RISES = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(lambda falls: [0, *accumulate(falls)])
CROSSED = st.builds(
    Crossed, RISES, RISES, st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), multiple=st.integers(1, 3)
)


@settings(max_examples=50, deadline=None)
@given(st.lists(CROSSED, min_size=1, max_size=2), SITES.map(lambda sites: sites[:1]), st.floats(0, 1))
def test_units_that_stand_in_others_cost_what_is_left_of_these(blocks, others, share):
    """A unit's own cost is what goes with it while the other space is whole; the crossing takes off what goes twice."""
    curves, crossings = {}, []
    for index, block in enumerate(blocks):
        inner, outer = len(block.inner) - 1, len(block.outer) - 1
        curves[index, "inner"] = Curve(block.inner, block.each * outer + block.own, block.multiple)
        curves[index, "outer"] = Curve(block.outer, block.each * inner + block.alone)
        pair = (index, "inner"), (index, "outer")
        crossings.append(Crossing([pair], {pair: block.each}))
    curves |= {(index, "other"): Curve(site.errors, site.cost, site.multiple) for index, site in enumerate(others)}
    # Linear costs count what goes with both spaces twice over.
    twice = sum(block.each * (len(block.inner) - 1) * (len(block.outer) - 1) for block in blocks)

    def spent(kept):
        pairs = sum(block.cost(kept[i, "inner"], kept[i, "outer"]) for i, block in enumerate(blocks))
        return pairs + sum(site.cost * kept[i, "other"] for i, site in enumerate(others))

    most = spent({key: curve.units for key, curve in curves.items()})
    least = sum(block.cost(block.inner_widths[0], 1) for block in blocks) + sum(
        site.cost * widths(site)[0] for site in others
    )
    budget = least + int(share * (most - least))
    kept = least_error(curves, budget + twice, crossings)
    assert list(kept) == list(curves)
    assert spent(kept) <= budget
    best = brute_force_crossed(blocks, others, budget)
    assert total_error(curves, kept, crossings) == pytest.approx(float(best), abs=1e-12)
    if budget == most:
        assert kept == {key: curve.units for key, curve in curves.items()}


@settings(max_examples=40, deadline=None)
@given(st.tuples(RISES, RISES, RISES), st.tuples(*[st.integers(0, 3)] * 3), st.floats(0, 1))
def test_three_sites_that_cross(rises, sides, share):
    """Values (v) in query heads (q) in groups (g), of a projection of g·q·v lines, and others of g·v, g·q and g."""
    names = ("v", "q", "g")
    most = dict(zip(names, (len(rise) - 1 for rise in rises), strict=True))

    def cost(v, q, g):
        return g * q * v + sides[0] * g * v + sides[1] * g * q + sides[2] * g

    def error(v, q, g):
        lost = {name: rises[i][most[name] - kept] for i, (name, kept) in enumerate(zip(names, (v, q, g), strict=True))}
        inside_g, inside_q = g / most["g"], q / most["q"]
        return lost["v"] * inside_q * inside_g + lost["q"] * inside_g + lost["g"]

    full_cost = cost(**most)
    curves = {name: Curve(rises[i], full_cost - cost(**most | {name: most[name] - 1})) for i, name in enumerate(names)}
    shared = {
        ("v", "q"): most["g"],
        ("v", "g"): most["q"] + sides[0],
        ("q", "g"): most["v"] + sides[1],
        ("v", "q", "g"): 1,
    }
    crossing = Crossing([("v", "q"), ("v", "g"), ("q", "g")], shared)
    budget = cost(1, 1, 1) + int(share * (full_cost - cost(1, 1, 1)))
    linear = sum(curve.units * curve.unit_cost for curve in curves.values())
    kept = least_error(curves, budget + linear - full_cost, [crossing])
    assert cost(**kept) <= budget
    every = product(*(range(1, most[name] + 1) for name in names))
    best = min(error(*choice) for choice in every if cost(*choice) <= budget)
    assert total_error(curves, kept, [crossing]) == pytest.approx(error(**kept)) == pytest.approx(best)


def test_a_site_is_in_one_crossing():
    curves = {name: Curve([0, 1], 1) for name in "abc"}
    with pytest.raises(ValueError, match=r"^a site is in one crossing at the most$"):
        least_error(curves, 9, [Crossing([("a", "c")], {}), Crossing([("b", "c")], {})])


def test_choices_of_any_kind_leave_out_what_another_beats():
    choices = Choices.of([("q8_0", 9, 1.0), ("bad", 6, 3.0), ("q4_k", 5, 2.0), ("dear", 10, 1.0), ("q2_k", 3, 9.0)])
    assert list(choices.labels) == ["q2_k", "q4_k", "q8_0"]


POINTS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(POINTS, min_size=1, max_size=4), st.floats(0, 1), st.booleans())
def test_the_least_cost_under_an_error_is_found(sites, share, relaxed):
    choices = [Choices.of([(None, *point) for point in points]) for points in sites]
    low, high = (sum(float(c.errors[end]) for c in choices) for end in (-1, 0))
    allowed = low + share * (high - low)
    with patch.object(module, "MOST_COMBINATIONS", 0 if relaxed else module.MOST_COMBINATIONS):
        at = save(choices, allowed)
    cost = sum(float(c.costs[index]) for c, index in zip(choices, at, strict=True))
    error = sum(float(c.errors[index]) for c, index in zip(choices, at, strict=True))
    best = min(
        sum(float(c.costs[i]) for c, i in zip(choices, tried, strict=True))
        for tried in product(*(range(len(c)) for c in choices))
        if sum(float(c.errors[i]) for c, i in zip(choices, tried, strict=True)) <= allowed
    )
    assert error <= allowed
    assert cost >= best
    assert relaxed or cost == best


def test_a_loss_below_the_least_is_out_of_reach():
    with pytest.raises(BudgetError):
        save([Choices.of([("a", 1, 2.0), ("b", 2, 1.0)])], 0.5)
    assert spend([Choices.of([("a", 1, 2.0), ("b", 2, 1.0)])], 1.5) == [0]
