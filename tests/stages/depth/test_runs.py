"""The blocks of least cost, against every choice there is."""

from itertools import combinations

import pytest
import torch

from ckpt_prune.common.block_range import runs_of
from ckpt_prune.stages.depth.runs import least_blocks, least_runs


def costs(blocks: int, seed: int) -> list[list[float]]:
    return torch.rand(blocks + 1, blocks + 1, generator=torch.Generator().manual_seed(seed)).tolist()


def total(matrix: list[list[float]], gone: tuple[int, ...]) -> float:
    return sum(matrix[run.start][run.stop] for run in runs_of(gone))


def test_runs_of_blocks() -> None:
    assert runs_of([]) == []
    assert runs_of([3]) == [range(3, 4)]
    assert runs_of([0, 1, 4, 6, 7]) == [range(2), range(4, 5), range(6, 8)]


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_least_runs_are_the_best_of_all_choices(count: int, most: int) -> None:
    for seed in range(5):
        matrix, allowed = costs(8, seed), [block for block in range(8) if block != seed]
        able = [blocks for blocks in combinations(allowed, count) if len(runs_of(blocks)) <= most]
        chosen = least_runs(matrix, count, most, allowed)
        if not able:
            assert chosen is None
        else:
            assert chosen is not None
            assert tuple(chosen) == min(able, key=lambda blocks: total(matrix, blocks))


def test_least_blocks_take_the_first_of_equal_ones() -> None:
    assert least_blocks([1.0, 0.5, 0.5, 0.1, 0.5], 3, [0, 1, 2, 4]) == [1, 2, 4]
    assert least_blocks([1.0, 0.5, 0.5, 0.1, 0.5], 2, [0, 1, 2, 4]) == [1, 2]
