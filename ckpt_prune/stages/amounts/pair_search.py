"""Which of a few pairs of amounts is best: a search along two axes that measures no more than so many pairs."""

from collections.abc import Callable, Iterator

LIMIT = 9
"""Pairs that are measured at the most."""
_PARTS = 4
"""The first steps along an axis are so many from none to the most that may go."""

Pair = tuple[int, int]
"""Amounts of two axes."""


def least_pair(
    most: int, most_beside: Callable[[int], int], measure: Callable[[Pair], float | None], limit: int = LIMIT
) -> Pair | None:
    """The pair of the least value that is found from none of either on; of equal ones the one of fewer of the first.

    Pairs beside the best one along each axis are measured, a quarter of what may go apart, until none of them is
    better; then those half as far apart, down to one. Where none of either is no pair that there is, it begins with as
    much as there is of the second alone, and of both.

    Args:
        most: of the first axis.
        most_beside: of the second beside an amount of the first.
        measure: the value of a pair; None where there is no such pair.
        limit: pairs that are measured at the most.

    Returns:
        None where no pair that was measured is one.
    """
    tried: dict[Pair, float | None] = {}

    def best() -> Pair | None:
        found = {pair: value for pair, value in tried.items() if value is not None}
        return min(found, key=lambda pair: (found[pair], pair), default=None)

    def look(pair: Pair) -> None:
        if pair not in tried and len(tried) < limit:
            tried[pair] = measure(pair)

    look((0, 0))
    for pair in ((0, most_beside(0)), (most, most_beside(most))):
        if best() is None:
            look(pair)
    steps = _first_step(most), _first_step(most_beside(0))
    while (here := best()) is not None and len(tried) < limit:
        for pair in _beside(here, steps, most, most_beside):
            look(pair)
        if best() != here:
            continue
        if max(steps) == 1:
            break
        steps = (steps[0] + 1) // 2, (steps[1] + 1) // 2
    return best()


def _first_step(most: int) -> int:
    return max(1, -(-most // _PARTS))


def _beside(here: Pair, steps: Pair, most: int, most_beside: Callable[[int], int]) -> Iterator[Pair]:
    """The pairs one step away from another, as far as there are any; more of an axis before less of it."""
    first, second = here
    for amount in (first + steps[0], first - steps[0]):
        own = min(max(amount, 0), most)
        yield own, min(second, most_beside(own))
    for amount in (second + steps[1], second - steps[1]):
        yield first, min(max(amount, 0), most_beside(first))
