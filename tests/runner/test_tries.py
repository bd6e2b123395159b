"""`choose_for_loss`: how soon a budget whose predictions are off finds what keeps to a loss."""

import math
from types import SimpleNamespace

import pytest

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.runner.frontier.record import CLOSE, SMALLEST, choose_for_loss

LOSS = 0.2


def try_all(choose, measure):
    """Return what was chosen and measured, in order."""
    results, choices = [], []
    for _, choice in choose_for_loss(LOSS, results, choose):
        choices.append(choice)
        results.append(SimpleNamespace(score=SimpleNamespace(kl=measure(choice))))
    return choices, [each.score.kl for each in results]


@pytest.mark.parametrize("factor", (0.3, 1.05, 3.0))
def test_one_correction_mends_a_constant_factor(factor):
    _, lost = try_all(lambda allowed: allowed, lambda choice: factor * choice)
    assert len(lost) == 2
    assert math.isclose(lost[-1], LOSS / math.sqrt(CLOSE))


@pytest.mark.parametrize("power", (0.6, 1.5, 2.5))
def test_a_secant_mends_any_power(power):
    """Where losses rise faster or slower than what is predicted, one factor is not enough, and two tries tell both."""
    _, lost = try_all(lambda allowed: allowed, lambda choice: 5 * choice**power)
    assert len(lost) == len(SMALLEST)
    assert not LOSS / CLOSE <= lost[1] <= LOSS
    assert math.isclose(lost[2], LOSS / math.sqrt(CLOSE))


@pytest.mark.parametrize("power", (0.1, 10.0))
def test_noise_does_not_lead_astray(power):
    """A pair of tries that tells almost no rise, or one of a hundred times, moves the third by a bound."""
    allowed, lost = try_all(lambda allowed: allowed, lambda choice: 5 * choice**power)
    moved = abs(math.log(allowed[2] / allowed[1]) / math.log(LOSS / math.sqrt(CLOSE) / lost[1]))
    assert moved == pytest.approx(3 if power < 1 else 1 / 3)


def test_the_first_is_enough_where_it_is_close():
    _, lost = try_all(lambda allowed: allowed, lambda choice: 0.9 * choice)
    assert lost == [0.9 * LOSS]


def test_a_choice_that_repeats_is_not_made_again():
    choices, _ = try_all(lambda allowed: 7, lambda choice: 2 * LOSS)
    assert choices == [7]


def test_it_ends_where_nothing_is_left():
    def choose(allowed):
        if allowed < LOSS:
            raise BudgetError(allowed, LOSS)
        return allowed

    choices, _ = try_all(choose, lambda choice: 2 * choice)
    assert choices == [LOSS]
