"""`choose_for_loss`: how soon a budget whose predictions are off finds what keeps to a loss."""

import math
from types import SimpleNamespace

import pytest

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.runner.frontier.record import CLOSE, choose_for_loss

LOSS, AIM = 0.2, 0.2 / math.sqrt(CLOSE)


def try_all(measure, choose=lambda allowed: allowed):
    """Return what was chosen and measured, in order."""
    results, lost = [], []
    for _, choice in choose_for_loss(LOSS, results, choose):
        lost.append((choice, measure(choice)))
        results.append(SimpleNamespace(score=SimpleNamespace(kl=lost[-1][1])))
    return lost


@pytest.mark.parametrize(
    ("factor", "power", "tries"), [(0.9, 1, 1), (0.3, 1, 2), (3, 1, 2), (5, 0.6, 3), (5, 1.5, 3), (5, 2.5, 3)]
)
def test_a_factor_takes_two_tries_and_a_power_three(factor, power, tries):
    found = try_all(lambda choice: factor * choice**power)
    assert len(found) == tries
    assert found[-1][1] == pytest.approx(AIM if tries > 1 else factor * LOSS)


def test_noise_does_not_lead_astray():
    """A pair of tries that tells almost no rise moves the third by a bound."""
    _, (second, lost), (third, _) = try_all(lambda choice: 5 * choice**0.1)
    assert abs(math.log(third / second) / math.log(AIM / lost)) == pytest.approx(3)


@pytest.mark.parametrize("measure", [lambda choice: 0.4 if choice == LOSS else 0.01, lambda choice: 5 * choice**10])
def test_a_third_try_lies_between_what_is_good_and_what_is_too_much(measure):
    """A choice that is pruned loses far more than one that is whole, so that a line through both leads elsewhere."""
    (first, _), (second, _), (third, _) = try_all(measure)
    assert third == pytest.approx(math.sqrt(first * second))


def test_it_ends_where_nothing_is_left_or_a_choice_repeats():
    def choose(allowed):
        if allowed < LOSS:
            raise BudgetError(allowed, LOSS)
        return allowed

    assert try_all(lambda choice: 2 * choice, choose) == [(LOSS, 2 * LOSS)]
    assert try_all(lambda choice: 2 * LOSS, lambda allowed: 7) == [(7, 2 * LOSS)]
