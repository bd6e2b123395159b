"""Weights that were rounded before keep their steps and codes."""

import numpy as np
import pytest
import torch

from ckpt_prune.sparsity.steps import find_steps


def round_blocks(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Steps and codes of random blocks, some with few codes, one of zeros."""
    generator = np.random.default_rng(4)
    steps = torch.tensor(generator.uniform(0.001, 0.1, 500) * generator.choice([-1, 1], 500)).to(dtype)
    codes = generator.integers(-8, 8, (500, 32))
    codes[100:200] = np.clip(codes[100:200], -3, 2)
    codes[200:300] *= generator.random((100, 32)) < 0.1
    codes[300] = 0
    return steps.double().numpy(), codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_is_stored_again_as_it_is(dtype):
    steps, codes = round_blocks(dtype)
    weights = torch.tensor(steps[:, None] * codes).to(dtype).float().numpy()
    grid = find_steps(weights)
    assert grid is not None
    assert grid[1].min() >= -8
    assert grid[1].max() <= 7
    np.testing.assert_allclose(grid[0][:, None] * grid[1], steps[:, None] * codes, rtol=4e-3, atol=1e-9)


def test_one_weight_between_two_steps_is_enough_to_refuse():
    steps, codes = round_blocks(torch.float32)
    weights = (steps[:, None] * codes).astype(np.float32)
    weights[7, 3] += 0.3 * steps[7]
    assert find_steps(weights) is None
    assert find_steps(np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)) is None
