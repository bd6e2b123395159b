import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import obs as oracle
from torch import Tensor

from ckpt_prune.compensation.fit import Fit, squared_error
from ckpt_prune.compensation.least_squares import ridge
from ckpt_prune.scoring import obs
from ckpt_prune.scoring.obs import UnitRemoval, remove_greedily
from ckpt_prune.scoring.selection import select
from ckpt_prune.sparsity.damping import LEAST_DAMP, SingularHessianError


def layer(d_out: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and the Gram of correlated inputs of many sizes."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_out, d, generator=g, dtype=torch.float64)
    mix = torch.randn(d, d, generator=g, dtype=torch.float64) / (2 * d**0.5)
    mix += torch.diag(torch.exp(0.5 * torch.randn(d, generator=g, dtype=torch.float64)))
    x = torch.randn(4 * d, d, generator=g, dtype=torch.float64) @ mix
    return weight, x.T @ x


def ill_conditioned(d: int, condition: float, seed: int = 0) -> Tensor:
    """A dense Gram whose eigenvalues are evenly spread over their orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q
    values = torch.tensor(condition, dtype=torch.float64) ** -torch.linspace(0, 1, d, dtype=torch.float64)
    gram = (turn * values) @ turn.T
    return (gram + gram.T) / 2


def small_blocks(monkeypatch: pytest.MonkeyPatch, panel: int, rows: int) -> None:
    monkeypatch.setattr(obs, "PANEL", panel)
    monkeypatch.setattr(obs, "ROWS", rows)


def assert_greedy(removal: UnitRemoval, weight: Tensor, gram: Tensor, per_unit: int, rtol: float = 1e-10) -> None:
    order, costs = oracle.greedy(weight, gram, removal.strength, per_unit)
    assert removal.order.tolist() == order
    torch.testing.assert_close(removal.costs, torch.tensor(costs, dtype=torch.float64), rtol=rtol, atol=0)


@pytest.mark.parametrize("damp", [0.0, 0.05])
@pytest.mark.parametrize("d_out", [1, 5, 40])
@pytest.mark.parametrize(("panel", "rows"), [(128, 1024), (7, 5), (1, 1)])
@pytest.mark.parametrize(("d", "per_unit"), [(18, 1), (20, 5)])
def test_every_step_is_the_cheapest_removal_after_refitting(monkeypatch, d, per_unit, panel, rows, d_out, damp):
    small_blocks(monkeypatch, panel, rows)
    weight, gram = layer(d_out, d, seed=d + d_out)
    removal = remove_greedily(weight, gram, per_unit, damp=damp)
    assert removal.strength == pytest.approx(damp * float(gram.diagonal().mean()), rel=1e-12)
    assert_greedy(removal, weight, gram, per_unit)


@pytest.mark.parametrize("damp", [0.0, 1e-9, 1e-6])
@pytest.mark.parametrize("per_unit", [1, 4])
def test_the_curve_is_refitting_from_scratch_at_a_condition_of_a_million(monkeypatch, per_unit, damp):
    small_blocks(monkeypatch, 7, 16)
    weight, gram = layer(5, 40, seed=1)[0], ill_conditioned(40, 1e6)
    removal = remove_greedily(weight, gram, per_unit, damp=damp)
    assert removal.strength == pytest.approx(damp * float(gram.diagonal().mean()), rel=1e-12)
    assert_greedy(removal, weight, gram, per_unit, rtol=1e-8)
    expected = [
        oracle.cost(weight, gram, removal.strength, removal.order[:k].tolist(), per_unit)
        for k in range(40 // per_unit + 1)
    ]
    assert removal.curve[0] == 0
    torch.testing.assert_close(removal.curve, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=0)


@given(
    seed=st.integers(0, 2**31),
    units=st.integers(1, 9),
    per_unit=st.integers(1, 3),
    d_out=st.integers(1, 6),
    panel=st.integers(1, 8),
)
@settings(max_examples=25, deadline=None)
def test_identities(seed, units, per_unit, d_out, panel):
    weight, gram = layer(d_out, units * per_unit, seed)
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(d_out, d_out, generator=g, dtype=torch.float64)).Q
    shuffle = torch.randperm(units, generator=g)
    columns = (shuffle[:, None] * per_unit + torch.arange(per_unit)).flatten()
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, panel, 4)
        removal = remove_greedily(weight, gram, per_unit)
        turned = remove_greedily(turn @ weight, gram, per_unit)
        shuffled = remove_greedily(weight[:, columns], gram[columns][:, columns], per_unit)
        scaled = remove_greedily(2 * weight, 4 * gram, per_unit)
    assert sorted(removal.order.tolist()) == list(range(units))
    assert (removal.curve.diff() >= 0).all()
    assert removal.curve.shape == (units + 1,)
    assert torch.equal(removal.scores[removal.order], removal.costs)
    for keep in range(1, units + 1):
        assert select(removal.scores, keep).tolist() == sorted(removal.order[units - keep :].tolist())
    assert torch.equal(turned.order, removal.order)
    torch.testing.assert_close(turned.costs, removal.costs, rtol=1e-9, atol=0)
    assert torch.equal(shuffle[shuffled.order], removal.order)
    torch.testing.assert_close(shuffled.costs, removal.costs, rtol=1e-9, atol=0)
    assert torch.equal(scaled.order, removal.order)
    torch.testing.assert_close(scaled.costs, 16 * removal.costs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("per_unit", [1, 3])
def test_costs_are_what_ridge_leaves(per_unit):
    """J = the error of ridge on the kept columns, its penalty, and λ times the energy of the dropped weights."""
    weight, gram = layer(5, 12)
    removal = remove_greedily(weight, gram, per_unit, damp=0.2)
    dropped_columns = (removal.order[:, None] * per_unit + torch.arange(per_unit)).view(-1, per_unit)
    for k in range(12 // per_unit):
        dropped = dropped_columns[:k].flatten()
        kept = torch.tensor([j for j in range(12) if j not in dropped.tolist()])
        fit = Fit(
            count=48,
            sum=torch.zeros(len(kept), dtype=torch.float64),
            target_sum=torch.zeros(5, dtype=torch.float64),
            gram=gram[kept][:, kept],
            cross=weight @ gram[:, kept],
            target_energy=float(((weight @ gram) * weight).sum()),
        )
        fold = ridge(weight[:, kept], fit, removal.strength)
        moved = float((fold.weight - weight[:, kept]).square().sum() + weight[:, dropped].square().sum())
        objective = squared_error(fold, fit) + removal.strength * moved
        assert float(removal.curve[k]) == pytest.approx(objective, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("per_unit", [1, 2])
def test_inputs_always_zero(per_unit):
    """With damping they cost λ ‖W‖² like any other; without, λ is raised until the Gram is regular."""
    weight, gram = layer(5, 8)
    for dead in (2, 3):
        gram[dead] = gram[:, dead] = 0
    mean = float(gram.diagonal().mean())
    removal = remove_greedily(weight, gram, per_unit, damp=0.01)
    assert removal.strength == pytest.approx(0.01 * mean)
    assert_greedy(removal, weight, gram, per_unit)
    assert set(removal.order[: 2 // per_unit].tolist()) == {2 // per_unit, 3 // per_unit}
    removal = remove_greedily(weight, gram, per_unit, damp=0)
    assert removal.strength == pytest.approx(LEAST_DAMP * mean)
    assert_greedy(removal, weight, gram, per_unit, rtol=1e-8)


@pytest.mark.parametrize("per_unit", [1, 2])
def test_a_pass_that_rounding_spoils_is_done_again_with_more_damping(monkeypatch, per_unit):
    weight, gram = layer(3, 8)
    inverse = obs._inverse
    shares = []

    def spoil(gram: Tensor, scale: float, share: float) -> Tensor:
        shares.append(share)
        inverted = inverse(gram, scale, share)
        if len(shares) == 1:
            inverted[:4, 4:] *= 3
            inverted[4:, :4] *= 3
            inverted -= 0.9 * torch.linalg.eigvalsh(inverted).mean() * torch.eye(8, dtype=torch.float64)
        return inverted

    monkeypatch.setattr(obs, "_inverse", spoil)
    removal = remove_greedily(weight, gram, per_unit, damp=1e-3)
    assert shares == [1e-3, 1e-2]
    assert removal.strength == pytest.approx(1e-2 * float(gram.diagonal().mean()))
    assert_greedy(removal, weight, gram, per_unit)


def test_what_is_no_gram_is_refused():
    gram = torch.diag(torch.tensor([1.0, 1.0, -5.0]))
    with pytest.raises(SingularHessianError, match="calibrate again"):
        remove_greedily(torch.ones(2, 3), gram)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_infinities_and_nan_are_refused(which, value):
    arguments = [matrix.float() for matrix in layer(3, 4)]
    arguments[which][1, 2] = value
    with pytest.raises(ValueError, match=("the weight", "the Gram")[which] + " holds infinities or NaN"):
        remove_greedily(*arguments)


@pytest.mark.parametrize(
    ("weight", "gram", "per_unit", "damp", "message"),
    [
        ((3, 4), (5, 5), 1, 0.01, r"Gram of shape \(5, 5\) does not fit a weight of 4 inputs"),
        ((3, 4), (4,), 1, 0.01, r"Gram of shape \(4,\)"),
        ((4,), (4, 4), 1, 0.01, r"\(d_out, d\)"),
        ((3, 0), (0, 0), 1, 0.01, "at least one input"),
        ((3, 4), (4, 4), 3, 0.01, "4 inputs cannot be divided into units of 3"),
        ((3, 4), (4, 4), 0, 0.01, "units of 0"),
        ((3, 4), (4, 4), 1, -0.1, "damp"),
        ((3, 4), (4, 4), 1, float("nan"), "damp"),
    ],
)
def test_what_does_not_fit_is_refused(weight, gram, per_unit, damp, message):
    with pytest.raises(ValueError, match=message):
        remove_greedily(torch.ones(weight), torch.ones(gram), per_unit, damp=damp)


@pytest.mark.parametrize("per_unit", [1, 4])
def test_wide_inputs_go_in_float32_at_the_same_cost(monkeypatch, per_unit):
    weight, gram = layer(20, 120)
    gram *= torch.outer(*[torch.logspace(0, 1.5, 120, dtype=torch.float64)] * 2)
    exact = remove_greedily(weight, gram, per_unit)
    monkeypatch.setattr(obs, "WIDE", 0)
    removal = remove_greedily(weight, gram, per_unit)
    assert removal.costs.dtype == torch.float64
    assert not torch.equal(removal.costs, exact.costs)
    torch.testing.assert_close(removal.costs, exact.costs, rtol=1e-4, atol=0)
    assert sorted(removal.order.tolist()) == sorted(exact.order.tolist())


def test_what_float32_gets_wrong_is_done_in_float64(monkeypatch):
    weight, gram = layer(20, 60)
    exact = remove_greedily(weight, gram)
    monkeypatch.setattr(obs, "WIDE", 0)
    monkeypatch.setattr(obs, "AGREES", 0.0)
    removal = remove_greedily(weight, gram)
    assert torch.equal(removal.costs, exact.costs)
    # Hardly any damping, which nothing but float64 resolves.
    monkeypatch.setattr(obs, "AGREES", 1.0)
    assert torch.equal(remove_greedily(weight, gram, damp=1e-6).costs[-1:] > 0, torch.tensor([True]))


@pytest.mark.parametrize("per_unit", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5, 11, 12])
def test_an_order_may_end_with_the_units_that_go(monkeypatch, count, wide, per_unit):
    """In float32, too, where what is left is known to cost the rest of the whole."""
    small_blocks(monkeypatch, 7, 5)
    monkeypatch.setattr(obs, "WIDE", 1 if wide else 10**6)
    weight, gram = layer(9, 12 * per_unit, seed=3)
    full, partial = (remove_greedily(weight, gram, per_unit, count=number) for number in (None, count))
    assert partial.order[:count].tolist() == full.order[:count].tolist()
    assert sorted(partial.order.tolist()) == list(range(12))
    torch.testing.assert_close(partial.costs[:count], full.costs[:count], rtol=1e-5 if wide else 1e-10, atol=0)
    kept = [select(removal.scores, 12 - count).tolist() for removal in (full, partial)]
    assert kept[0] == kept[1]
    if count < 12:
        nexts = [
            oracle.cost(weight, gram, partial.strength, [*full.order[:count].tolist(), u], per_unit) for u in range(12)
        ]
        expected = sorted(cost for unit, cost in enumerate(nexts) if unit in partial.order[count:].tolist())
        torch.testing.assert_close(
            partial.costs[count:], torch.tensor(expected, dtype=torch.float64), rtol=1e-4 if wide else 1e-9, atol=0
        )


@pytest.mark.parametrize("count", [None, 5])
def test_columns_go_as_units_of_one_column_do(monkeypatch, count):
    """On an accelerator they take the steps of wider units. Columns 3 and 9 cost the same, column 6 nothing."""
    weight, gram = layer(5, 20)
    weight[:, 9], gram[9], gram[:, 9] = weight[:, 3], 0.0, 0.0
    gram[3], gram[:, 3], gram[6], gram[:, 6] = 0.0, 0.0, 0.0, 0.0
    gram[[3, 9], [3, 9]] = 2.0
    small_blocks(monkeypatch, 4, 7)
    by_rows = remove_greedily(weight, gram, count=count)
    monkeypatch.setattr(obs, "_Columns", obs._Units)
    by_units = remove_greedily(weight, gram, count=count)
    assert torch.equal(by_rows.order, by_units.order)
    torch.testing.assert_close(by_rows.costs, by_units.costs, rtol=1e-12, atol=0.0)
    places = by_rows.order.tolist()
    assert places[0] == 6
    assert places.index(9) == places.index(3) + 1
