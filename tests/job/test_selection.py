import itertools
from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.model.spaces import Site
from ckpt_prune.scoring.selection import select, select_ranked, standardise, units_kept
from tests.refusals import refusal


@pytest.mark.parametrize(
    ("units", "ratio", "rounding", "kept"),
    [
        (10, 0.7, "ceil", 3),
        (100, 0.29, "floor", 71),  # 28.999999999999996 in binary
        (100, 0.07, "ceil", 93),  # 7.000000000000001 in binary
        (10, 0.25, "floor", 8),
        (10, 0.25, "nearest", 7),  # half goes up: 3 are dropped
        (10, 0.24, "nearest", 8),
        (10, 0.25, "ceil", 7),
        (7, 0.0, "ceil", 7),
        (1, 0.99, "floor", 1),
    ],
)
def test_rounding_is_of_the_decimal_number_as_written(units, ratio, rounding, kept):
    assert units_kept(units, ratio, rounding) == kept


@given(st.integers(1, 20000), st.integers(0, 999))
def test_counts_are_those_of_exact_fractions(units, thousandths):
    dropped = units * Fraction(thousandths, 1000)
    if floor(dropped) < units:
        assert units_kept(units, thousandths / 1000, "floor") == units - floor(dropped)
    if ceil(dropped) < units:
        assert units_kept(units, thousandths / 1000, "ceil") == units - ceil(dropped)


@pytest.mark.parametrize(
    ("units", "ratio", "multiple", "kept"),
    [(11008, 0.2, 64, 8832), (11008, 0.2, 1, 8806), (22, 0.25, 8, 16), (22, 0.1, 8, 22)],
)
def test_widths_are_rounded_up_to_a_multiple_but_not_past_the_dense_one(units, ratio, multiple, kept):
    assert units_kept(units, ratio, "ceil", multiple) == kept


@pytest.mark.parametrize(
    ("ratio", "kept"), [(0.0, 64), (0.1, 64), (0.125, 64), (0.2, 48), (0.3, 48), (0.4, 32), (0.8, 16), (0.9, 16)]
)
def test_of_widths_in_steps_the_nearest_is_taken(ratio, kept):
    assert units_kept(64, ratio, "steps", 16) == kept


def test_dropping_everything_is_refused():
    assert refusal(units_kept, 4, 0.9, "ceil") == "ratio 0.9 would drop all 4 units of a space: at least one must stay"


def test_ties_go_to_the_lower_index():
    assert select(torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]), 2).tolist() == [1, 2]
    assert select(torch.zeros(1000), 500).tolist() == list(range(500))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_selection_is_the_best_subset(scores, data):
    keep = data.draw(st.integers(1, len(scores)))
    kept = select(torch.tensor(scores, dtype=torch.float64), keep).tolist()
    best = max(
        itertools.combinations(range(len(scores)), keep), key=lambda c: (sum(scores[i] for i in c), [-i for i in c])
    )
    assert kept == list(best)


def test_standardised_scores_have_mean_zero_and_unit_deviation():
    columns = np.array([1.0, 5.0, 2.0, 8.0, 4.0, 4.0])
    z = (columns - columns.mean()) / columns.std(ddof=1)
    standard_scores = standardise(torch.from_numpy(columns), 2).numpy()
    np.testing.assert_allclose(standard_scores, [z[:2].mean(), z[2:4].mean(), z[4:].mean()], rtol=1e-12)
    np.testing.assert_allclose(standardise(torch.from_numpy(columns * 7 + 3), 2).numpy(), standard_scores, rtol=1e-12)


def ranked_oracle(scores, cost, budget):
    """Walk down the ranking; stop where the cost kept so far is nearest to the budget, the earlier stop on a tie."""
    ranking = sorted(
        ((site, unit) for site in scores for unit in range(len(scores[site]))),
        key=lambda entry: -scores[entry[0]][entry[1]],
    )
    stops = []
    for length in range(len(ranking) + 1):
        spent = sum(cost[site.space] for site, _ in ranking[:length])
        stops.append((abs(spent - budget), length))
    length = min(stops)[1]
    kept = {site: sorted(unit for s, unit in ranking[:length] if s == site) for site in scores}
    for site, units in kept.items():
        if not units:
            units.append(max(range(len(scores[site])), key=lambda u: scores[site][u]))
    return kept


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=5), min_size=1, max_size=3),
    st.sampled_from([1.0, 4.0, 170.5]),
    st.floats(0, 1),
)
def test_one_ranking_over_many_sites(heads, mlp, weight, share):
    scores = {Site(b, "heads"): s for b, s in enumerate(heads)} | {Site(b, "mlp"): s for b, s in enumerate(mlp)}
    cost = {"heads": weight, "mlp": 1.0}
    budget = share * sum(len(s) * cost[site.space] for site, s in scores.items())
    kept = select_ranked({site: torch.tensor(s, dtype=torch.float64) for site, s in scores.items()}, cost, budget)
    assert {site: units.tolist() for site, units in kept.items()} == ranked_oracle(scores, cost, budget)


def test_one_ranking_as_flaps_released_code_cuts():
    """The unit with which the cost comes nearest to the budget is the threshold, and goes with all of its score."""
    scores = {Site(0, "heads"): [3.0, -1.0], Site(0, "mlp"): [2.0, 1.0, 0.0, -2.0], Site(1, "mlp"): [2.5, 1.0, -3.0]}
    cost, tensors = {"heads": 2.0, "mlp": 1.0}, {}
    for site, values in scores.items():
        tensors[site] = torch.tensor(values, dtype=torch.float64)
    for budget in range(1, 12):
        ranking = sorted(
            ((value, cost[site.space]) for site, values in scores.items() for value in values),
            key=lambda pair: -pair[0],
        )
        spent = [sum(weight for _, weight in ranking[: length + 1]) for length in range(len(ranking))]
        threshold = ranking[min(range(len(spent)), key=lambda i: (abs(spent[i] - budget), i))][0]
        expected = {s: [u for u, value in enumerate(values) if value > threshold] for s, values in scores.items()}
        kept = select_ranked(tensors, cost, float(budget), below_cut=True)
        # A site that would lose all keeps its best unit, which the code does not see to.
        assert {s: units.tolist() for s, units in kept.items()} == {s: best or [0] for s, best in expected.items()}


@pytest.mark.parametrize(("ratio", "heads", "columns"), [(0.1, 29, 9907), (0.2, 26, 8806), (0.3, 23, 7705)])
def test_the_counts_of_rcpu_table_5(ratio, heads, columns):
    assert units_kept(32, ratio, "floor") == heads
    assert units_kept(11008, ratio, "ceil") == columns
