import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.common.errors import UserError
from ckpt_prune.stages.rotation.importance import (
    Term,
    entropy,
    entropy_within_groups,
    importance,
    objective,
    rotate_weight,
    sensitivity,
)
from tests.oracles import rotation_entropy as oracle
from tests.problems import BACKBONES, DAMP, make_block, orthogonal

ROTATIONS = [(True, True), (True, False), (False, True)]


def rotations(block, residual: bool, heads: bool):
    return (
        orthogonal(block.hidden, block.hidden, seed=1) if residual else None,
        orthogonal(block.kv, block.head_dim, block.head_dim, seed=2) if heads else None,
    )


def expected_entropy(block, name, backbone, R1, R2):
    W, H, left, right = block.weights[name]
    R1, R2 = (None if R is None else R.numpy() for R in (R1, R2))
    L = oracle.full_rotation(left, W.shape[0], R1, R2)
    R = oracle.full_rotation(right, W.shape[1], R1, R2)
    values = oracle.importance(backbone, W.numpy(), H.numpy(), DAMP, L, R)
    given = {"residual": R1 is not None, "heads": R2 is not None}
    return values, oracle.entropy(values, rows=given.get(right, False), columns=given.get(left, False))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("residual", "heads"), ROTATIONS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_importance_and_objective_equal_the_oracle(backbone, residual, heads, group):
    block = make_block(group=group)
    R1, R2 = rotations(block, residual, heads)
    total = 0.0
    for term in block.terms(backbone):
        values, term_entropy = expected_entropy(block, term.name, backbone, R1, R2)
        ours = importance(term, backbone, R1, R2).numpy()
        # Up to scale: sensitivities are in units of the mean diagonal.
        np.testing.assert_allclose(ours / ours.sum(), values / values.sum(), rtol=1e-10)
        assert float(objective([term], backbone, R1, R2)) == pytest.approx(term_entropy, rel=1e-11, abs=1e-12)
        total += term_entropy
    assert float(objective(block.terms(backbone), backbone, R1, R2)) == pytest.approx(total, rel=1e-11)


@pytest.mark.parametrize("sides", [("residual", None), ("heads", None), (None, "residual"), (None, "heads")])
def test_widths_that_do_not_fit(sides):
    with pytest.raises(ValueError, match="does not fit"):
        rotate_weight(torch.zeros(7, 7), *sides, torch.eye(10), torch.eye(3).expand(2, 3, 3))
    # Twice as many rows as KV heads have are not a group: only query heads share a rotation.
    with pytest.raises(ValueError, match="does not fit"):
        rotate_weight(torch.zeros(12, 10), "heads", None, None, torch.eye(3).expand(2, 3, 3))


def test_moments_that_are_missing():
    R = orthogonal(4, 4)
    with pytest.raises(ValueError, match="needs the inputs"):
        importance(Term("w", torch.ones(4, 4).double(), None, None, "residual"), "wanda", R, None)
    with pytest.raises(ValueError, match="whole matrix"):
        importance(Term("w", torch.ones(4, 4).double(), torch.ones(4), None, "residual"), "wanda", R, None)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_diagonal_is_enough_where_nothing_turns(backbone):
    W, H, left, right = make_block().weights["down"]
    R1 = orthogonal(10, 10)
    full, diagonal = (Term("down", W, sensitivity(H, backbone, f, DAMP), left, right) for f in (True, False))
    torch.testing.assert_close(importance(full, backbone, R1, None), importance(diagonal, backbone, R1, None))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), backbone=st.sampled_from(BACKBONES), single=st.booleans())
def test_totals_that_are_invariant(seed, backbone, single):
    dtype, tolerance = (torch.float32, 1e-4) if single else (torch.float64, 1e-10)
    block = make_block(seed)
    R1, R2 = orthogonal(10, 10, seed=seed).to(dtype), orthogonal(2, 3, 3, seed=seed).to(dtype)
    for term in block.terms(backbone):
        inputs = None if term.inputs is None else term.inputs.to(dtype)
        term = Term(term.name, term.weight.to(dtype), inputs, term.left, term.right)
        left_only = Term(term.name, term.weight, inputs, term.left, None)
        before, after = (importance(left_only, backbone, *R) for R in ((None, None), (R1, R2)))
        torch.testing.assert_close(after.sum(0), before.sum(0), rtol=tolerance, atol=0)
        if backbone == "magnitude":
            before, after = (importance(term, backbone, *R).sum() for R in ((None, None), (R1, R2)))
            torch.testing.assert_close(after, before, rtol=tolerance, atol=0)
            right_only = Term(term.name, term.weight, inputs, None, term.right)
            before, after = (importance(right_only, backbone, *R).sum(1) for R in ((None, None), (R1, R2)))
            torch.testing.assert_close(after, before, rtol=tolerance, atol=0)
        # What appendix B argues with: the output's energy, tr(W H Wᵀ).
        W, H, left, right = (x.to(dtype) if isinstance(x, torch.Tensor) else x for x in block.weights[term.name])
        turned = rotate_weight(W, left, right, R1, R2)
        H_turned = rotate_weight(rotate_weight(H, None, right, R1, R2).T.contiguous(), None, right, R1, R2)
        torch.testing.assert_close(((turned @ H_turned) * turned).sum(), ((W @ H) * W).sum(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
def test_entropy_where_it_is_known(dim):
    uniform = torch.full((3, 5), 7.0).double()
    assert float(entropy(uniform, dim)) == pytest.approx({0: 5 * math.log(3), 1: 3 * math.log(5)}[dim])
    assert float(entropy(torch.eye(4).double(), dim)) == 0.0
    assert float(entropy(torch.zeros(3, 4), dim)) == 0.0
    one_empty = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).double()
    assert float(entropy(one_empty, dim)) == pytest.approx({0: 0.0, 1: math.log(2)}[dim])


@pytest.mark.parametrize("backbone", BACKBONES)
def test_gradients(backbone):
    block = make_block(hidden=5, mlp=4, head_dim=2)
    terms = block.terms(backbone)
    R1, R2 = (R.requires_grad_() for R in rotations(block, True, True))
    assert torch.autograd.gradcheck(lambda a, b: objective(terms, backbone, a, b), (R1, R2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_at_zero_weights(dtype):
    weight = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 5.0, 0.0]], dtype=dtype, requires_grad=True)
    (entropy(weight.square(), 0) + entropy(weight.square(), 1)).backward()
    assert bool(weight.grad.isfinite().all())
    assert bool((weight.grad[0, :2] != 0).all())


@pytest.mark.parametrize("full", [True, False])
def test_sensitivity_is_that_of_the_damped_hessian(full):
    H = make_block().weights["up"][1]
    scaled = H / H.diagonal().mean()
    wanda, sparsegpt = sensitivity(H, "wanda", full), sensitivity(H, "sparsegpt", full, 0.3)
    inverse = torch.linalg.inv(scaled + 0.3 * torch.eye(10))
    torch.testing.assert_close(wanda, scaled if full else scaled.diagonal())
    torch.testing.assert_close(sparsegpt, inverse if full else inverse.diagonal())
    assert wanda.dtype == sparsegpt.dtype == sensitivity(H.float(), "wanda", full).dtype == torch.float64
    assert sensitivity(H, "magnitude", full) is None


@pytest.mark.parametrize("samples", [1, 40])
def test_the_released_code_damps_the_inverse_too(samples):
    _, H, _, _ = make_block().weights["up"]
    H[3], H[:, 3] = 0, 0
    R = orthogonal(10, 10, seed=1)
    inverse = sensitivity(H, "sparsegpt", True, DAMP, released=samples)
    for turn in (torch.eye(10).double(), R):
        ours = (turn.T @ inverse @ turn).diagonal()
        expected = torch.tensor(oracle.released_divisor(H.numpy(), DAMP, samples, turn.numpy()))
        torch.testing.assert_close(ours / ours.sum(), expected / expected.sum())
    torch.testing.assert_close(sensitivity(H, "sparsegpt", False, DAMP, released=samples), inverse.diagonal())


def test_dead_inputs_count_next_to_nothing():
    H = torch.diag(torch.tensor([4.0, 0.0, 2.0])).double()
    for full in (True, False):
        sensitivities = sensitivity(H, "sparsegpt", full, 0.01)
        diagonal = sensitivities.diagonal() if full else sensitivities
        torch.testing.assert_close(1 / diagonal, torch.tensor([4 / 3, 0, 2 / 3]).double() + 0.01)
    assert float(sensitivity(H, "wanda", False)[1]) == 0
    torch.testing.assert_close(sensitivity(torch.zeros(3, 3), "sparsegpt", False, 0.5), torch.full((3,), 2.0).double())
    assert bool((sensitivity(torch.zeros(3, 3), "wanda", True) == 0).all())


def test_more_damping_where_the_hessian_stays_singular():
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    singular = x.T @ x
    scaled = singular / singular.diagonal().mean()
    sensitivities = sensitivity(singular, "sparsegpt", True, 0.0)
    torch.testing.assert_close(sensitivities, torch.linalg.inv(scaled + 1e-4 * torch.eye(5)))
    # Cholesky gets through a pivot that is rounding.
    twice = torch.tensor([[1, 1], [1, 1 + 1e-14]]).double()
    sensitivities = sensitivity(twice, "sparsegpt", False, 0.0)
    torch.testing.assert_close(sensitivities, torch.linalg.inv(twice + 1e-4 * torch.eye(2)).diagonal())
    # Ten times 0.01 is enough.
    sensitivities = sensitivity(torch.diag(torch.tensor([2.0, 0.95, -0.05])).double(), "sparsegpt", False, 0.01)
    torch.testing.assert_close(1 / sensitivities, torch.tensor([2.1, 1.05, 0.05]).double(), atol=1e-6, rtol=1e-6)
    # A float32 Gram's negative eigenvalue: 0.01 and 0.1 are not enough, 1 is.
    indefinite = torch.diag(torch.tensor([2.0, 0.5, -0.5])).double()
    sensitivities = sensitivity(indefinite, "sparsegpt", False, 0.01)
    torch.testing.assert_close(1 / sensitivities, torch.tensor([3.0, 1.5, 0.5]).double())
    # An input that was never seen is not among those whose mean the damping is a share of.
    sensitivities = sensitivity(torch.diag(torch.tensor([3.0, 1.0, 0.0])).double(), "sparsegpt", False, 0.1)
    torch.testing.assert_close(1 / sensitivities, torch.tensor([1.6, 0.6, 0.1]).double())


def test_hessians_beyond_help():
    with pytest.raises(
        UserError,
        match=r"block 3 o_proj: the Hessian is singular with damping 0.01, 0.1, 1 of .* more calibration",
    ):
        sensitivity(torch.diag(torch.tensor([4.0, 1.0, -9.0])), "sparsegpt", True, 0.01, name="block 3 o_proj")
    with pytest.raises(UserError, match=r"block 3 o_proj: .* not finite"):
        sensitivity(torch.full((2, 2), float("nan")), "wanda", True, name="block 3 o_proj")
    with pytest.raises(ValueError, match="damping"):
        sensitivity(torch.eye(2), "sparsegpt", True, -1.0)


# ---- inside the groups of an N:M pattern -------------------------------------------------------------------------


def test_entropy_inside_groups_equals_the_oracle():
    """Each group's own entropy, counted by its share of the row; rows and groups without importance count nothing."""
    values = torch.rand(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    values[1] = 0
    values[2, 4:8] = 0
    assert float(entropy_within_groups(values, 4)) == pytest.approx(
        oracle.entropy_in_groups(values.numpy(), 4), rel=1e-12
    )


@pytest.mark.parametrize(("row", "nats"), [([1.0, 0, 0, 0, 0, 5, 0, 0], 0.0), ([1.0] * 8, math.log(4))])
def test_entropy_inside_groups_where_it_is_known(row, nats):
    assert float(entropy_within_groups(torch.tensor([row]), 4)) == pytest.approx(nats, abs=1e-6)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_objective_of_groups_counts_every_turned_layer_once(backbone):
    block = make_block(2, hidden=12, mlp=16)
    residual, heads = orthogonal(12, 12), orthogonal(2, 3, 3)
    terms = [term for term in block.terms(backbone) if term.left is not None or term.right is not None]
    expected = sum(oracle.entropy_in_groups(importance(term, backbone, residual, heads).numpy(), 4) for term in terms)
    assert float(objective(terms, backbone, residual, heads, groups=4)) == pytest.approx(expected, rel=1e-9)


def test_the_sum_over_groups_keeps_what_bfloat16_rounds_off():
    values = torch.rand(300, 16, generator=torch.Generator().manual_seed(1))
    coarse, fine = entropy(values.bfloat16(), 1), entropy(values.bfloat16().double(), 1)
    assert coarse.dtype == torch.float32
    assert float(coarse) == pytest.approx(float(fine), rel=2e-3)
