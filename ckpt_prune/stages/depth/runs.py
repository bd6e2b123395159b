"""Which blocks go: so many of them, in so few runs, at the least cost. Pure functions of costs."""

from collections.abc import Collection, Sequence


def least_blocks(costs: Sequence[float], count: int, allowed: Collection[int]) -> list[int]:
    """Return the blocks of least cost, each by itself; of equal ones the first. Ascending.

    Args:
        allowed: blocks that may go, `count` at least.
    """
    return sorted(sorted(allowed, key=lambda block: (costs[block], block))[:count])


def least_runs(costs: Sequence[Sequence[float]], count: int, most: int, allowed: Collection[int]) -> list[int] | None:
    """The blocks of `most` runs at the most whose costs add up to the least, ascending; None where there are none.

    Args:
        costs: of dropping blocks a to b − 1 together, at [a][b].
    """
    blocks, inside = len(costs) - 1, set(allowed)
    # What is best for so many blocks in so many runs before a block that stays, by dynamic programming.
    best: list[dict[tuple[int, int], tuple[float, tuple[int, ...]]]] = [{} for _ in range(blocks + 2)]
    best[0][0, 0] = 0.0, ()
    for start in range(blocks + 1):
        for (gone, runs), (cost, removed) in best[start].items():
            _keep(best[start + 1], (gone, runs), cost, removed)
            if runs == most:
                continue
            for stop in range(start + 1, min(blocks, start + count - gone) + 1):
                if stop - 1 not in inside:
                    break
                here = (gone + stop - start, runs + 1)
                # The block at `stop` stays: two runs side by side would be one.
                _keep(best[stop + 1], here, cost + costs[start][stop], (*removed, *range(start, stop)))
    ends = [best_runs for (gone, _), best_runs in best[blocks + 1].items() if gone == count]
    return list(min(ends)[1]) if ends else None


def _keep(
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]], key: tuple[int, int], cost: float, gone: tuple[int, ...]
) -> None:
    """Enter blocks that go under a key, unless those there cost less."""
    if key not in best or (cost, gone) < best[key]:
        best[key] = cost, gone
