"""Held-out errors of fits with a bias, from the decomposition of those without."""

from collections.abc import Callable

import pytest
import torch

from ckpt_prune.compensation import choice
from ckpt_prune.compensation.fit import Blend, Fit
from ckpt_prune.compensation.held_out import LEAST, FoldScore
from ckpt_prune.compensation.methods import GRID, METHODS, SHARES

OUTPUTS, KEPT = 5, 9


def blend(tokens: int, seed: int, far: float, *, drift: bool) -> Blend:
    """Tokens far from zero, of which one input never changes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = normal(tokens, KEPT) + far * torch.linspace(-1, 2, KEPT, dtype=torch.float64)
    inputs[:, 0] = far
    targets, moved = normal(tokens, OUTPUTS) + inputs[:, :OUTPUTS], 0.3 * normal(tokens, OUTPUTS) + 0.2
    fit = Fit(
        tokens,
        inputs.sum(0),
        targets.sum(0),
        inputs.T @ inputs,
        targets.T @ inputs,
        float(targets.square().sum()),
    )
    if not drift:
        return Blend(fit)
    energy, along = float(moved.square().sum()), float((moved * targets).sum())
    return Blend(fit, moved.T @ inputs, moved.sum(0), energy, along)


@pytest.mark.parametrize("far", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize("towards", ["kept", "zero"])
def test_one_decomposition_serves_fits_with_a_bias(far: float, drift: bool, towards: str) -> None:
    train, fold = blend(40, 1, far, drift=drift), blend(20, 2, far, drift=drift).at(1.0)
    weight = torch.randn(OUTPUTS, KEPT, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    base = weight if towards == "kept" else None
    mean = float(train.fit.second_moments()[0].diagonal().mean())
    strengths = [value * mean for value in GRID]
    expected = FoldScore.of(train, fold, centred=True).errors(base, strengths, SHARES)
    plain = FoldScore.of(train, fold, centred=False)
    assert plain.can_add_bias(strengths)
    torch.testing.assert_close(plain.with_bias(train).errors(base, strengths, SHARES), expected, rtol=1e-8, atol=0)


def test_it_is_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    train, fold = blend(40, 1, 1.0, drift=True), blend(20, 2, 1.0, drift=True).at(1.0)
    weight = torch.ones(OUTPUTS, KEPT, dtype=torch.float64)
    fits: list[bool] = []
    of: Callable[..., FoldScore] = FoldScore.of

    def count_fits(train: Blend, fold: Fit, *, centred: bool) -> FoldScore:
        fits.append(centred)
        return of(train, fold, centred=centred)

    monkeypatch.setattr(FoldScore, "of", count_fits)
    ridges = [METHODS["ridge"], METHODS["affine"]]
    mean = float(train.fit.second_moments()[0].diagonal().mean())
    for least, expected in ((1e-4, [False]), (0.0, [False, True]), (LEAST / 10, [False, True])):
        fits.clear()
        trials = list(choice._ridges(ridges, weight, train, fold, [least * mean, mean], [0.0, 1.0]))
        assert [method.name for method, _ in trials] == ["ridge", "affine"]
        assert fits == expected
