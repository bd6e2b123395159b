"""Weights are taken out by the harm they do for each byte, the most harmful first, and no more than it takes."""

from functools import partial
from itertools import product

import pytest

from ckpt_prune.budget.choices import BudgetError, save, spend
from ckpt_prune.onnx.quantization.choosing import Form, Prices, choose_weights, count_measurements, price_weights

HARMS = {"a": 0.5, "b": 0.01, "c": 0.2, "d": 0.02}
SAVED = {"a": 100, "b": 100, "c": 10, "d": 100}


def forms(saved):
    """Few bits, and more that lose nothing."""
    return {name: [Form("few", 100), Form("more", 100 + bytes_, 0.0)] for name, bytes_ in saved.items()}


def lost_of(harms):
    return lambda labels: sum(harms[name] for name, label in labels.items() if label == "few")


def alone(names):
    (name,) = names
    return HARMS[name]


def choose(allowed, together=None, alone=alone):
    return choose_weights(forms(SAVED), together or lost_of(HARMS), lambda: price_weights(forms(SAVED), alone), allowed)


@pytest.mark.parametrize(("allowed", "more"), [(0.73, ""), (0.6, "c"), (0.1, "ca"), (0.015, "cad"), (0.0, "cadb")])
def test_so_many_as_it_takes(allowed, more):
    """c harms less than a, but saves a tenth."""
    choice = choose(allowed)
    assert "".join(choice.more) == more
    assert {name for name, label in choice.labels.items() if label == "more"} == set(more)
    assert choice.together == pytest.approx(lost_of(HARMS)(choice.labels))
    assert choice.alone == ({} if not more else HARMS)


def test_nothing_is_measured_alone_where_all_may_be_rounded():
    def never(names):
        raise AssertionError(names)

    assert choose(1.0, alone=never).more == ()


def test_where_nothing_is_enough_all_are_taken_out():
    choice = choose(0.5, together=lambda _labels: 1.0)
    assert (set(choice.labels.values()), choice.together) == ({"more"}, 1.0)


def test_nothing_to_choose_from():
    assert choose_weights({}, lambda _labels: 0.0, lambda: price_weights({}, alone), 0.5).labels == {}


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_losses_that_do_not_add_up_are_corrected_for(factor):
    """Together weights lose more or less than the sum: what is chosen is what would be by losses that are as large."""
    harms = {name: factor * lost for name, lost in HARMS.items()}
    allowed = 0.25 * factor
    assert choose(allowed, together=lost_of(harms)).more == choose(0.25).more


def test_bytes_are_spent_where_they_keep_most():
    several = {name: [Form("4", 100), Form("5", 130, 0.2), Form("8", 200, 0.01)] for name in HARMS}
    prices = price_weights(several, alone)
    choice = prices.at_cost(400 + 130)
    assert choice.labels == {"a": "8", "b": "4", "c": "5", "d": "4"}
    assert choice.predicted == pytest.approx(0.01 * 0.5 + 0.01 + 0.2 * 0.2 + 0.02)
    assert prices.at_loss(choice.predicted).labels == choice.labels


MANY = {f"{role}{number}": 0.001 * weight for role, weight in (("q", 1), ("v", 9)) for number in range(40)}
MANY |= {"q17": 0.5, "v3": 0.4}
ROLES = [[name for name in MANY if name[0] == role] for role in "qv"]


def search(most, alike=ROLES, allowed=0.2):
    """Choose among many weights, and return the choice with every set that was measured for its rank."""
    measured: list[tuple[str, ...]] = []

    def rank(names):
        measured.append(tuple(names))
        return sum(MANY[name] for name in names)

    own = forms(dict.fromkeys(MANY, 100))
    return choose_weights(own, lost_of(MANY), lambda: price_weights(own, rank, alike, most), allowed), measured


def test_of_many_weights_those_alike_are_measured_at_once_and_the_worst_runs_halved():
    choice, measured = search(26)
    assert len(measured) == 26
    assert measured[:2] == [tuple(role) for role in ROLES]
    assert set(measured[2]) < set(ROLES[1])  # the role that loses more
    assert choice.more[:2] == ("q17", "v3")
    assert choice.alone["q17"] == pytest.approx(0.5)
    assert (choice.at_once["q17"], choice.at_once["v3"]) == (1, 1)
    assert all(name.startswith("v") for name in choice.more[2:])
    assert choice.together <= 0.2


def test_what_is_measured_at_once_shares_what_it_loses_by_bytes():
    choice, measured = search(2)
    assert measured == [tuple(role) for role in ROLES]
    assert choice.at_once == dict.fromkeys(MANY, 40)
    assert choice.alone["q0"] == pytest.approx(sum(MANY[name] for name in ROLES[0]) / 40)


def test_a_larger_search_finds_no_worse_a_choice():
    sizes = [len(search(most)[0].more) for most in (2, 14, 26, 80)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == len(search(80, alike=())[0].more)  # each alone


def test_roles_beyond_what_may_be_measured_are_halved_as_one():
    choice, measured = search(5, alike=[[name] for name in MANY])
    assert measured[0] == tuple(MANY)
    assert len(measured) == 5
    assert choice.together <= 0.2


def test_so_many_sets_are_measured():
    assert [count_measurements(count) for count in (0, 1, 8, 64, 211)] == [(0, 2), (1, 2), (8, 5), (64, 8), (64, 10)]
    _, measured = search(64)
    assert len(measured) <= 64


@pytest.mark.parametrize(
    ("limit", "loss", "prunes"),
    [(560, None, False), (250, None, True), (150, None, True), (None, 0.1, False), (None, 0.3, False), (None, 2, True)],
)
def test_columns_and_forms_are_one_choice(limit, loss, prunes):
    """The best of all combinations of two widths and of forms of three weights, by their sums."""
    alone, mlps = {"out": 0.4, "up": 0.2, "down": 0.3}, {3: ["up", "down"]}
    forms = [Form("few", 100), Form("more", 200, 0.2), Form("float", 400, 0.0)]
    prices = Prices(dict.fromkeys(alone, forms), alone, dict.fromkeys(alone, 1))
    columns, rounding, pruning = {3: {20: 0.6, 40: 0.15, 80: 0.0}}, 0.5, 2.0
    sums = []
    for width, dropped in columns[3].items():
        for taken in product(range(3), repeat=3):
            parts = [1.0, width / 80, width / 80]
            used = [(part, alone[name], forms[at]) for name, part, at in zip(alone, parts, taken, strict=True)]
            cost = sum(part * form.cost for part, _, form in used)
            lost = pruning * dropped + rounding * sum(part * price * form.share for part, price, form in used)
            sums.append((cost, lost, width, pruning * dropped))
    if loss is None:
        cost, least, width, dropped = min((each for each in sums if each[0] <= limit), key=lambda each: each[1])
    else:
        cost, least, width, dropped = min(each for each in sums if each[1] <= loss)
    costs = lambda name, share: [float(share) * form.cost for form in prices.forms[name]]  # noqa: E731
    solve = partial(spend, budget=limit) if loss is None else partial(save, allowed=loss)
    choice = prices.with_columns(solve, mlps, columns, costs, rounding, pruning)
    assert (choice.predicted, choice.by_pruning, choice.cost) == pytest.approx((least, dropped, cost))
    assert choice.columns == ((width,) if prunes else ())
    assert prunes == (width < 80)
    with pytest.raises(BudgetError):
        prices.with_columns(partial(spend, budget=100), mlps, columns, costs)
