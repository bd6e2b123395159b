import pytest
import torch
from oracles import masks as oracle

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.zero_patterns import GroupPattern
from ckpt_prune.sparsity.damping import LEAST_DAMP, SingularHessianError
from ckpt_prune.sparsity.masks import zeros_of
from ckpt_prune.sparsity.sparsegpt import PrunedWeight, prune_weight, relative_error

PATTERNS = [(2, 4), (4, 8), (1, 4), (3, 4), (1, 2)]


def layer(rows: int, width: int, seed: int = 0, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and the Gram of correlated inputs of many sizes."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=g, dtype=torch.float64)
    mix = torch.randn(width, width, generator=g, dtype=torch.float64) / width**0.5
    mix += torch.diag(torch.exp(0.5 * torch.randn(width, generator=g, dtype=torch.float64)))
    x = torch.randn(tokens or 4 * width, width, generator=g, dtype=torch.float64) @ mix
    return weight, x.T @ x


def damp_gram(H: torch.Tensor, damp: float) -> torch.Tensor:
    return H + damp * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)


def assert_is(pruned_weight: PrunedWeight, weight: torch.Tensor, keep: torch.Tensor) -> None:
    assert torch.equal(pruned_weight.keep, keep)
    assert (pruned_weight.weight[~keep] == 0).all()
    torch.testing.assert_close(pruned_weight.weight, weight, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.77, 1.0])
@pytest.mark.parametrize(("width", "block"), [(20, 128), (44, 20), (23, 5), (6, 1), (40, 40)])
def test_unstructured_is_the_textbook_surgeon(width, block, ratio):
    weight, H = layer(5, width, seed=width)
    expected = oracle.sparsegpt(weight, damp_gram(H, 0.01), block=block, count=lambda n: zeros_of(n, ratio))
    pruned_weight = prune_weight(weight, H, pattern=None, ratio=ratio, block=block)
    assert_is(pruned_weight, *expected)
    assert pruned_weight.damp == 0.01
    assert pruned_weight.dead == 0
    for ours in pruned_weight.keep.split(block, 1):
        assert int((~ours).sum()) == zeros_of(ours.numel(), ratio)


@pytest.mark.parametrize("block", [128, 12, 8, 3])
@pytest.mark.parametrize(("kept", "of"), PATTERNS)
def test_groups_are_the_textbook_surgeon(kept, of, block):
    weight, H = layer(6, 40, seed=of)
    expected = oracle.sparsegpt(weight, damp_gram(H, 0.05), block=of, groups=(kept, of))
    pruned_weight = prune_weight(weight, H, pattern=GroupPattern(kept, of), ratio=0.0, block=block, damp=0.05)
    assert_is(pruned_weight, *expected)
    assert (pruned_weight.keep.view(6, -1, of).sum(2) == kept).all()


@pytest.mark.parametrize("pattern", [None, GroupPattern(2, 4)])
def test_strips_and_blocks_of_the_default_size(pattern):
    """More than one of each, against one block of the whole width or (unstructured) the oracle."""
    weight, H = layer(3, 272)
    pruned_weight = prune_weight(weight, H, pattern=pattern, ratio=0.5)
    if pattern:
        in_one_block = prune_weight(weight, H, pattern=pattern, ratio=0.5, block=272)
        assert_is(pruned_weight, in_one_block.weight, in_one_block.keep)
    else:
        assert_is(pruned_weight, *oracle.sparsegpt(weight, damp_gram(H, 0.01), block=128, count=lambda n: n // 2))


def test_a_ratio_of_zero_changes_nothing():
    weight, H = layer(4, 16)
    weight[0, 0], H[2], H[:, 2] = -0.0, 0, 0
    pruned_weight = prune_weight(weight, H, pattern=None, ratio=0.0)
    assert torch.equal(pruned_weight.weight.view(torch.int64), weight.view(torch.int64))
    assert pruned_weight.keep.all()
    assert pruned_weight.dead == 1


@pytest.mark.parametrize(("kept", "of"), [*PATTERNS, (None, None)])
def test_dead_inputs_go_first_and_trouble_nobody(kept, of):
    """The live part is what it would be without them; their own weights are zero and count as dropped."""
    weight, H = layer(5, 24)
    dead = torch.zeros(24, dtype=torch.bool)
    dead[[1, 8, 9, 10, 11, 12, 23]] = True
    H[dead] = H[:, dead] = 0
    pattern = None if of is None else GroupPattern(kept, of)
    pruned_weight = prune_weight(weight, H, pattern=pattern, ratio=0.5, block=8, damp=0.1)
    assert pruned_weight.dead == 7
    assert (pruned_weight.weight[:, dead] == 0).all()

    live = H[~dead][:, ~dead]
    filled = torch.eye(24, dtype=torch.float64)
    filled[(~dead).nonzero(), (~dead).nonzero().T] = damp_gram(live, 0.1)
    start = weight.masked_fill(dead, 0)
    expected = (
        oracle.sparsegpt(start, filled, block=8, count=lambda n: n // 2)
        if pattern is None
        else oracle.sparsegpt(start, filled, block=of, groups=(kept, of))
    )
    assert_is(pruned_weight, *expected)
    # Groups and blocks where as many have to go as are dead, or more: no dead weight is among those that stay.
    for part, gone in zip(pruned_weight.keep.split(of or 8, 1), dead.split(of or 8), strict=True):
        if of is not None and int(gone.sum()) <= of - kept:
            assert not part[:, gone].any()


def test_products_of_a_dead_input_are_rounding():
    """Squares underflow before products do. (Far more than rounding here, to be seen.)"""
    weight, H = layer(3, 8)
    H[2] = H[:, 2] = 1e-3
    H[2, 2] = 0
    clean = H.clone()
    clean[2] = clean[:, 2] = 0
    pruned_weight, expected = (prune_weight(weight, matrix, pattern=None, ratio=0.5) for matrix in (H, clean))
    assert torch.equal(pruned_weight.weight, expected.weight)


def test_scores_that_tie_are_settled_row_by_row():
    pruned_weight = prune_weight(torch.ones(3, 4), torch.eye(4), pattern=None, ratio=0.5)
    assert pruned_weight.keep.tolist() == [[True] * 4, [True, True, False, False], [False] * 4]
    pruned_weight = prune_weight(torch.ones(3, 4), torch.eye(4), pattern=GroupPattern(1, 2), ratio=0.0)
    assert pruned_weight.keep.tolist() == [[True, False, True, False]] * 3


def test_a_singular_hessian_is_damped_until_it_is_not():
    weight, H = layer(4, 16, tokens=5)
    pruned_weight = prune_weight(weight, H, pattern=None, ratio=0.5, damp=0)
    assert pruned_weight.damp == LEAST_DAMP
    expected = prune_weight(weight, H, pattern=None, ratio=0.5, damp=LEAST_DAMP)
    assert torch.equal(pruned_weight.weight, expected.weight)


def with_lowest(value: float) -> torch.Tensor:
    """A matrix of mean diagonal 1 whose lowest eigenvalue is `value`: no damping below −value makes it definite."""
    H = torch.eye(8, dtype=torch.float64)
    H[2, 6] = H[6, 2] = 1 - value
    return H


@pytest.mark.parametrize(("lowest", "damp", "used"), [(-0.05, 0.01, 0.1), (-0.5, 0.01, 1.0), (-0.5, 0.2, 0.7)])
def test_damping_rises_tenfold(lowest, damp, used):
    weight, _ = layer(4, 8)
    pruned_weight = prune_weight(
        weight, with_lowest(lowest), pattern=GroupPattern(2, 4), ratio=0.0, damp=damp, most_damp=used
    )
    assert pruned_weight.damp == pytest.approx(used)
    expected = oracle.sparsegpt(weight, damp_gram(with_lowest(lowest), used), block=4, groups=(2, 4))
    assert_is(pruned_weight, *expected)


@pytest.mark.parametrize(
    ("lowest", "damp", "most", "listed"),
    [
        (-2.0, 0.01, 1.0, "0.01, 0.1, 1"),
        (-2.0, 0.02, 1.0, "0.02, 0.2, 1"),
        (-0.5, 0.0, 0.01, "0, 0.0001, 0.001, 0.01"),
        (-0.5, 0.3, 0.1, "0.3"),
    ],
)
def test_damping_stops_at_the_bound(lowest, damp, most, listed):
    weight, _ = layer(4, 8)
    with pytest.raises(SingularHessianError) as caught:
        prune_weight(weight, with_lowest(lowest), pattern=None, ratio=0.5, damp=damp, most_damp=most)
    assert isinstance(caught.value, UserError)
    assert str(caught.value) == (
        f"the Hessian is singular with damping {listed} of its mean diagonal: use more calibration samples"
    )


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_a_pivot_of_rounding_is_a_singular_hessian(scale):
    """Cholesky itself takes some of these: an input given twice leaves a pivot of either sign."""
    weight, H = layer(4, 32, seed=3)
    for seed in range(20):
        mix = torch.randn(31, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rows = torch.cat([torch.eye(31, dtype=torch.float64), mix[None]])
        singular = rows @ H[:31, :31] @ rows.T * scale
        with pytest.raises(SingularHessianError, match=r"with damping 0 of"):
            prune_weight(weight, singular, pattern=None, ratio=0.5, damp=0, most_damp=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_hessian_that_is_not_finite_is_refused(value):
    weight, H = layer(4, 8)
    H[2, 5] = value
    with pytest.raises(UserError, match="holds infinities or NaN: calibrate again") as caught:
        prune_weight(weight, H, pattern=None, ratio=0.5)
    assert not isinstance(caught.value, SingularHessianError)


def test_shapes_and_settings_that_do_not_fit_are_refused():
    weight, H = layer(4, 10)
    with pytest.raises(ValueError, match="pattern 2:4 needs a width divisible by 4, and 10 is not"):
        prune_weight(weight, H, pattern=GroupPattern(2, 4), ratio=0.0)
    with pytest.raises(ValueError, match="does not fit a weight of 10 inputs"):
        prune_weight(weight, H[:9, :9], pattern=None, ratio=0.5)
    for wrong in ({"block": 0}, {"damp": -0.1}, {"damp": float("nan")}):
        with pytest.raises(ValueError, match="block must be at least 1 and damp at least 0"):
            prune_weight(weight, H, pattern=None, ratio=0.5, **wrong)
    with pytest.raises(ValueError, match="lies between 0 and 1"):
        prune_weight(weight, H, pattern=None, ratio=1.5)
    weight[1, 1] = float("nan")
    with pytest.raises(ValueError, match="not a number"):
        prune_weight(weight, H, pattern=None, ratio=0.5)


def test_relative_error_is_that_of_the_outputs():
    weight, _ = layer(1500, 6)
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pruned = weight * (weight.abs() > 0.5)
    expected = (x @ (weight - pruned).T).square().sum() / (x @ weight.T).square().sum()
    assert relative_error(weight, pruned, x.T @ x) == pytest.approx(float(expected), rel=1e-10)
    assert relative_error(weight.float(), pruned.float(), (x.T @ x).float()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pattern", [None, GroupPattern(2, 4)])
def test_a_gpu_gives_the_same_result(pattern):
    weight, H = layer(40, 320)
    here, there = (prune_weight(weight.to(d), H.to(d), pattern=pattern, ratio=0.5) for d in ("cpu", "cuda"))
    assert_is(PrunedWeight(there.weight.cpu(), there.keep.cpu(), there.damp, there.dead), here.weight, here.keep)
