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


@pytest.mark.parametrize(("power", "most"), [(0.1, 3), (10, 1 / 3)])
def test_noise_does_not_lead_astray(power, most):
    """A pair of tries that tells almost no rise, or one of a hundred times, moves the third by a bound."""
    _, (second, lost), (third, _) = try_all(lambda choice: 5 * choice**power)
    assert abs(math.log(third / second) / math.log(AIM / lost)) == pytest.approx(most)


def test_it_ends_where_nothing_is_left_or_a_choice_repeats():
    def choose(allowed):
        if allowed < LOSS:
            raise BudgetError(allowed, LOSS)
        return allowed

    assert try_all(lambda choice: 2 * choice, choose) == [(LOSS, 2 * LOSS)]
    assert try_all(lambda choice: 2 * LOSS, lambda allowed: 7) == [(7, 2 * LOSS)]
