"""The search along two axes, without a model."""

import pytest

from ckpt_prune.stages.joint_counts.counts import LIMIT, Pair, least_pair


class Bowl:
    """A value that is least at one pair, of pairs (a, b) with a ≤ 8 and b ≤ 12 - a, and what was asked of it."""

    def __init__(self, least: Pair, impossible: int = -1) -> None:
        self.least, self.impossible, self.asked = least, impossible, list[Pair]()

    def __call__(self, pair: Pair) -> float | None:
        assert 0 <= pair[0] <= 8
        assert 0 <= pair[1] <= 12 - pair[0]
        self.asked.append(pair)
        if sum(pair) < self.impossible:
            return None
        return float((pair[0] - self.least[0]) ** 2 + 2 * (pair[1] - self.least[1]) ** 2)

    def found(self, limit: int = 100) -> Pair | None:
        return least_pair(8, lambda first: 12 - first, self, limit)


@pytest.mark.parametrize("least", [(0, 0), (0, 3), (3, 0), (2, 5), (8, 4), (5, 7)])
def test_the_least_of_a_bowl_is_found_and_nothing_is_measured_twice(least: Pair) -> None:
    bowl = Bowl(least)
    assert bowl.found() == least
    assert len(bowl.asked) == len(set(bowl.asked))


def test_no_more_is_measured_than_the_limit_and_the_best_of_that_counts() -> None:
    bowl = Bowl((5, 7))
    best = bowl.found(LIMIT)
    assert len(bowl.asked) == LIMIT
    assert best == min(bowl.asked, key=lambda pair: Bowl((5, 7))(pair))


def test_where_there_is_no_pair_at_all() -> None:
    bowl = Bowl((0, 0), impossible=100)
    assert bowl.found() is None
    assert bowl.asked == [(0, 0), (0, 12), (8, 4)]
