"""GPTQ against its paper's own loop, and against rounding to the nearest."""

import numpy as np
import pytest
import torch

from ckpt_prune.onnx.quantization.blocks import BlockRounding, round_by_gptq, round_to_nearest
from tests.oracles.gptq import round_row

RNG = np.random.default_rng(1)


def inputs(rows: int, tokens: int = 400) -> np.ndarray:
    """Correlated, as real ones are."""
    return RNG.standard_normal((tokens, rows)) @ (RNG.standard_normal((rows, rows)) * 0.3 + np.eye(rows))


@pytest.mark.parametrize("symmetric", [False, True])
def test_blocks_are_rounded_as_in_the_paper_inputs_of_large_energy_first(symmetric):
    x, grid = inputs(64), BlockRounding(4, 32, symmetric)
    matrix = RNG.standard_normal((64, 5)).astype(np.float32)
    gram = x.T @ x
    blocks, nearest = round_by_gptq(matrix, torch.from_numpy(gram), grid, damp=0.01), round_to_nearest(matrix, grid)
    assert np.array_equal(blocks.scales, nearest.scales)
    order = np.argsort(-np.diag(gram), kind="stable")
    ordered, hessian = matrix[order].astype(np.float64), gram[np.ix_(order, order)]
    for column in range(5):
        scale = np.repeat(nearest.scales[column].astype(np.float64), 32)[order]
        zero = np.repeat(nearest.unpack_zeros()[column].astype(np.float64), 32)[order]
        expected = round_row(ordered[:, column], hessian, scale, zero, 15, 0.01)
        assert np.array_equal(blocks.unpack_codes()[column].reshape(-1)[order], expected)


@pytest.mark.parametrize("rows", [64, 72])
def test_outputs_are_nearer_than_those_of_the_nearest(rows):
    """Also where the last block is not full."""
    x, grid = inputs(rows), BlockRounding(4, 32, symmetric=False)
    matrix = RNG.standard_normal((rows, 24)).astype(np.float32)
    ours, nearest = (
        np.square(x @ (blocks.to_matrix() - matrix)).sum()
        for blocks in (round_by_gptq(matrix, torch.from_numpy(x.T @ x), grid), round_to_nearest(matrix, grid))
    )
    assert ours < 0.8 * nearest


def test_inputs_that_are_never_there_are_rounded_to_the_nearest():
    x, grid = inputs(32), BlockRounding(4, 32, symmetric=False)
    x[:, 7] = 0
    matrix = RNG.standard_normal((32, 4)).astype(np.float32)
    blocks = round_by_gptq(matrix, torch.from_numpy(x.T @ x), grid)
    assert np.array_equal(blocks.to_matrix()[7], round_to_nearest(matrix, grid).to_matrix()[7])


def test_zeros_stay_zeros():
    blocks = round_by_gptq(np.zeros((32, 3), np.float32), torch.eye(32), BlockRounding(4, 16, symmetric=False))
    assert not blocks.to_matrix().any()
