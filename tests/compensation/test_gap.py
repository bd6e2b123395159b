"""The map in place of blocks that are gone, against plain least squares on all tokens."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt_prune.compensation.gap import absorb_map, fit_map
from ckpt_prune.measure.moments.inputs import Drift, Moments
from tests.oracles.gap import held_out, ridge_map

GRID = [0.01, 0.1, 1.0, 10.0]


def tokens(seed: int, *, noise: float = 0.3, count: int = 240, width: int = 6) -> tuple[list[Tensor], list[Tensor]]:
    """Three folds of z and y, y a map of z with an offset and noise."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(count, width, generator=generator, dtype=torch.float64) + 0.5
    true = torch.eye(width).double() + 0.4 * torch.randn(width, width, generator=generator, dtype=torch.float64)
    y = z @ true.T + 0.7 + noise * torch.randn(count, width, generator=generator, dtype=torch.float64)
    return list(z.chunk(3)), list(y.chunk(3))


def moments(z: list[Tensor], y: list[Tensor]) -> list[Moments]:
    folds = []
    for inputs, target in zip(z, y, strict=True):
        width = inputs.shape[1]
        sums = Moments.zeros(width, gram=True).accumulate(inputs)
        drift = Drift.zeros(width, width).accumulate(target - inputs, inputs)
        folds.append(Moments(**{**vars(sums), "drift": drift}))
    return folds


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("strength", [1e-4, 0.1, 5.0])
def test_a_map_of_fixed_strength(strength: float, biased: bool) -> None:
    z, y = tokens(1)
    fit = fit_map(moments(z, y), biased=biased, strength=strength)
    Z, Y = (np.concatenate([fold.numpy() for fold in folds]) for folds in (z, y))
    T, b = ridge_map(Z, Y, strength, biased=biased)
    assert np.allclose(fit.weight.numpy(), T, atol=1e-5)
    assert (fit.method, fit.strength) == ("affine" if biased else "ridge", strength)
    assert np.allclose(np.zeros(6) if fit.bias is None else fit.bias.numpy(), b, atol=1e-5)
    energy = np.square(Y).sum()
    assert fit.error_compensated == pytest.approx(np.square(Y - Z @ T.T - b).sum() / energy, rel=1e-4)
    assert fit.error_uncompensated == pytest.approx(np.square(Y - Z).sum() / energy, rel=1e-4)
    held_out_error = held_out([fold.numpy() for fold in z], [fold.numpy() for fold in y], strength, biased=biased)
    assert fit.error_held_out == pytest.approx(held_out_error, rel=1e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_the_strength_of_least_held_out_error(biased: bool) -> None:
    z, y = tokens(2, noise=2.0, count=45)
    fit = fit_map(moments(z, y), biased=biased, grid=GRID)
    folds = [fold.numpy() for fold in z], [fold.numpy() for fold in y]
    errors = {strength: held_out(*folds, strength, biased=True) for strength in GRID}
    if not biased:
        errors = {strength: held_out(*folds, strength, biased=False) for strength in GRID}
    assert fit.strength == min(errors, key=lambda strength: errors[strength])
    assert fit.error_held_out == pytest.approx(min(errors.values()), rel=1e-4)


def test_no_map_where_none_helps_on_held_out_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    z = list(torch.randn(12, 6, generator=generator, dtype=torch.float64).chunk(3))
    y = [inputs + 0.5 * torch.randn(inputs.shape, generator=generator, dtype=torch.float64) for inputs in z]
    fit = fit_map(moments(z, y), biased=False, grid=[1e-4, 1e-3])
    assert fit.identity
    assert torch.equal(fit.weight, torch.eye(6, dtype=torch.float64))
    assert fit.error_held_out == pytest.approx(fit.error_uncompensated)


def test_what_a_map_is_absorbed_in() -> None:
    z, y = tokens(4)
    fit = fit_map(moments(z, y), biased=True, strength=0.1)
    weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(5))
    mapped, added = absorb_map(fit, weight, torch.ones(6))
    assert torch.equal(mapped, fit.weight @ weight.double())
    assert added is not None
    assert fit.bias is not None
    assert torch.equal(added, 1 + fit.bias)
