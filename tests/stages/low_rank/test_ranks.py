"""Which rank every linear gets."""

import itertools

import pytest

from ckpt_prune.stages.low_rank.ranks import Thin, ranks_by_energy, uniform_ranks

LINEARS = {
    "a": Thin(6, 6, (9.0, 0.5, 0.3, 0.1, 0.05, 0.05)),
    "b": Thin(4, 8, (3.0, 2.9, 2.8, 2.7)),
    "c": Thin(8, 6, (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)),
}


def cost(ranks: dict[str, int]) -> int:
    """Parameters of all, of those that stay whole too."""
    return sum(
        linear.rows * linear.columns if key not in ranks else ranks[key] * (linear.rows + linear.columns)
        for key, linear in LINEARS.items()
    )


def error(ranks: dict[str, int]) -> float:
    return sum(sum(LINEARS[key].energies[rank:]) / sum(LINEARS[key].energies) for key, rank in ranks.items())


def test_one_share_of_every_weight():
    assert uniform_ranks(LINEARS, 0.3) == {"a": 2, "b": 1, "c": 2}
    # Rounded up to three, a's factors are as large as its weight, and b's and c's larger or no smaller.
    assert uniform_ranks(LINEARS, 0.3, multiple_of=3) == {"c": 3}


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.6])
def test_by_energy_no_choice_of_that_size_is_better(ratio):
    room = cost(uniform_ranks(LINEARS, ratio))
    chosen = ranks_by_energy(LINEARS, ratio)
    assert cost(chosen) <= room
    assert error(chosen) <= error(uniform_ranks(LINEARS, ratio))
    choices = [
        [None, *range(1, linear.rows * linear.columns // (linear.rows + linear.columns) + 1)]
        for linear in LINEARS.values()
    ]
    every = [dict(zip(LINEARS, ranks, strict=True)) for ranks in itertools.product(*choices)]
    within = [{key: rank for key, rank in ranks.items() if rank is not None} for ranks in every]
    # Greedy: optimal but for what is left over of the room, which is less than the dearest direction.
    dearest = max(linear.rows + linear.columns for linear in LINEARS.values())
    best = min(error(ranks) for ranks in within if cost(ranks) <= cost(chosen))
    assert (
        error(chosen) <= best + 1e-12
        or cost(chosen) <= room - dearest
        or error(chosen) <= min(error(ranks) for ranks in within if cost(ranks) <= room - dearest)
    )


def test_what_would_be_larger_in_two_stays_whole():
    assert "b" not in ranks_by_energy(LINEARS | {"d": Thin(40, 40, (1.0,) + (0.0,) * 39)}, 0.3)
