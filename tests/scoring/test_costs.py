import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import obs as oracle
from torch import Tensor

from ckpt_prune.scoring import costs as costs_module
from ckpt_prune.scoring.costs import WIDE, DropOrder
from ckpt_prune.scoring.obs import remove_greedily
from ckpt_prune.sparsity.damping import DAMP, LEAST_DAMP, SingularHessianError

from .test_obs import layer


def costs_in_order(
    weight: Tensor, gram: Tensor, order: Tensor, per_unit: int = 1, *, metric: Tensor | None = None, damp: float = 0.01
) -> Tensor:
    return DropOrder.of(weight, gram, order, per_unit, damp=damp).costs(metric)


def by_hand(weight: Tensor, gram: Tensor, order: list[int], per_unit: int, damp: float) -> Tensor:
    strength = damp * float(gram.diagonal().mean())
    costs = [oracle.cost(weight, gram, strength, order[:k], per_unit) for k in range(len(order) + 1)]
    return torch.tensor(costs, dtype=torch.float64)


def square_root(metric: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(metric)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


@pytest.mark.parametrize("damp", [0.0, 0.05])
@pytest.mark.parametrize(("d_out", "d", "per_unit"), [(5, 18, 1), (1, 18, 3), (40, 20, 5), (7, 6, 6)])
def test_every_prefix_costs_what_a_refit_of_the_rest_leaves(d_out, d, per_unit, damp):
    weight, gram = layer(d_out, d, seed=d + d_out)
    order = torch.randperm(d // per_unit, generator=torch.Generator().manual_seed(3))
    costs = costs_in_order(weight, gram, order, per_unit, damp=damp)
    torch.testing.assert_close(costs, by_hand(weight, gram, order.tolist(), per_unit, damp), rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 10_000), rank=st.integers(1, 6), damp=st.sampled_from([0.01, 1.0]))
@settings(max_examples=20, deadline=None)
def test_a_metric_is_that_of_a_turned_weight(seed, rank, damp):
    """F^{1/2} W in place of W, whatever the rank of F."""
    weight, gram = layer(6, 8, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    half = torch.randn(6, rank, generator=g, dtype=torch.float64)
    metric = half @ half.T
    order = torch.randperm(8, generator=g)
    costs = costs_in_order(weight, gram, order, metric=metric, damp=damp)
    expected = by_hand(square_root(metric) @ weight, gram, order.tolist(), 1, damp)
    torch.testing.assert_close(costs, expected, rtol=1e-8, atol=1e-8 * float(expected[-1]))


@given(seed=st.integers(0, 10_000), per_unit=st.sampled_from([1, 2]))
@settings(max_examples=20, deadline=None)
def test_in_the_order_of_greedy_removal_they_are_its_own(seed, per_unit):
    weight, gram = layer(4, 12, seed=seed)
    greedy = remove_greedily(weight, gram, per_unit, damp=0.01)
    costs = costs_in_order(weight, gram, greedy.order, per_unit, damp=0.01)
    torch.testing.assert_close(costs, greedy.curve, rtol=1e-9, atol=1e-9)
    assert bool((costs.diff() >= 0).all())


def test_a_singular_gram_is_damped_and_no_gram_is_refused():
    weight, gram = layer(3, 6)
    gram[2] = gram[:, 2] = 0  # an input that is always zero
    order = torch.arange(6)
    costs = costs_in_order(weight, gram, order, damp=0.0)
    torch.testing.assert_close(costs, by_hand(weight, gram, order.tolist(), 1, LEAST_DAMP), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        costs_in_order(weight, torch.zeros(6, 6), order),
        torch.zeros(7).double() + torch.cat([torch.zeros(1), weight.square().sum(0).cumsum(0) * 0.01]),
        rtol=1e-9,
        atol=1e-9,
    )
    with pytest.raises(SingularHessianError):
        costs_in_order(weight, -torch.eye(6), order)


@pytest.mark.parametrize("per_unit", [1, 3])
def test_what_is_lost_is_what_a_refit_leaves(per_unit):
    weight, gram = layer(5, 12, seed=1)
    order = torch.randperm(12 // per_unit, generator=torch.Generator().manual_seed(3))
    drop_order = DropOrder.of(weight, gram, order, per_unit, damp=0.05)
    strength = 0.05 * gram.diagonal().mean()
    for count in (0, 1, len(order) - 1, len(order)):
        dropped = oracle.columns(order[:count].tolist(), per_unit)
        kept = [j for j in range(12) if j not in dropped]
        expected = weight.clone()
        if kept:
            damped = gram[kept][:, kept] + strength * torch.eye(len(kept), dtype=torch.float64)
            target = weight @ gram[:, kept] + strength * weight[:, kept]
            expected[:, kept] -= torch.linalg.solve(damped, target.T).T
        torch.testing.assert_close(drop_order.lost(count), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("per_unit", [1, 3])
def test_what_moves_an_output_needs_no_refit(per_unit):
    """g·(W − Ŵ)x of every width at once, from x = L u."""
    weight, gram = layer(5, 12, seed=2)
    g = torch.Generator().manual_seed(4)
    inputs, gradient = (torch.randn(7, n, generator=g, dtype=torch.float64) for n in (12, 5))
    order = DropOrder.of(weight, gram, torch.randperm(12 // per_unit, generator=g), per_unit)
    counts = [1, 2, 12 // per_unit]
    expected = torch.stack([((gradient @ order.lost(count)) * inputs).sum(1) for count in counts], 1)
    torch.testing.assert_close(order.project_on_gradient(inputs, gradient, counts), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("loudness", [1.0, 30.0])
def test_a_wide_gram_is_factorised_in_float32_to_a_thousandth(loudness):
    """Against float64. Three inputs are that much larger than the others, as some of real models are."""
    weight, gram = wide_layer(loudness)
    order = torch.randperm(len(gram), generator=torch.Generator().manual_seed(5))
    single, double = DropOrder.of(weight, gram, order), in_float64(weight, gram, order)
    assert single.factor.dtype == torch.float32
    torch.testing.assert_close(single.costs()[1:], double.costs()[1:], rtol=1e-3, atol=0)
    lost = double.lost(700)
    assert float((single.lost(700) - lost).norm()) <= 1e-3 * float(lost.norm())


def test_a_wide_gram_that_float32_has_no_digits_for_is_factorised_in_float64():
    """Two inputs are all but the same, and hardly anything is added to the diagonal."""
    weight, gram = wide_layer(1.0)
    gram[1], gram[:, 1] = gram[0], gram[:, 0]
    gram[1, 1] = gram[0, 0]
    order = torch.randperm(len(gram), generator=torch.Generator().manual_seed(5))
    drop_order = DropOrder.of(weight, gram, order, damp=1e-6)
    assert drop_order.factor.dtype == torch.float64
    assert torch.equal(drop_order.costs(), in_float64(weight, gram, order, 1e-6).costs())


def wide_layer(loudness: float) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(6)
    mix = torch.randn(60, WIDE + 76, generator=g)
    tokens = torch.randn(3000, 60, generator=g) @ mix + torch.randn(3000, WIDE + 76, generator=g)
    tokens[:, :3] *= loudness
    return torch.randn(40, WIDE + 76, generator=g), tokens.T @ tokens


def in_float64(weight: Tensor, gram: Tensor, order: Tensor, damp: float = DAMP) -> DropOrder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs_module, "WIDE", len(gram))
        return DropOrder.of(weight, gram, order, damp=damp)
