"""Importance of rotated weights, and its entropy, which learning lowers (DenoiseRotator section 3).

R1 turns the residual stream and R2 the heads. A linear layer y = W x between them keeps its meaning as

    W' = Lᵀ W R,   x' = Rᵀ x,   H' = Rᵀ H R,   H = Σ x xᵀ.

L and R are R1, one R2 per KV head, or nothing. The importance of its weights (appendix A, tables 5-7) is then

    magnitude (W')²,   Wanda (W')² · diag(Rᵀ H R),   SparseGPT (W')² / diag(Rᵀ H⁻¹ R).

In exact arithmetic these are invariant (appendix B has an approximate argument; checked in tests/sparsity):

- Under L, the total of every column, for all three: the divisor or factor of a column is not touched.
- Under R, the total of every row, for magnitude.
- Under both, ‖W X‖² = tr(W H Wᵀ), with which appendix B argues. It is not Σ importance: that leaves out the products
  of two weights, since removing all at once does not cost the sum of removing each (OBD's second-order term).

Under R the totals of Wanda and SparseGPT are NOT invariant, against the paper's section 3.3.2. An example is W = (1, 0)
and H = diag(1, 0), turned by 45°: W' = (±1, ±1)/√2 and diag(H') = (½, ½), so Wanda's total goes from 1 to ½. Entropy
normalises each group, and so does not see its total: learning does not need the invariance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.parallel.devices import multiplies_bfloat16
from ckpt_prune.recipe.names import Backbone
from ckpt_prune.sparsity.damping import DAMP, SingularHessianError, damped_cholesky, live_mean
from ckpt_prune.stages.rotation.records import BIN, FARTHEST

CELLS = 24
"""Cells of a map along each side, at most."""
LARGEST = 0.01
"""Share of the weights whose share of the importance is told."""


def cell_means(values: Tensor, cells: int = CELLS) -> list[list[float]]:
    """Return means over cells of a matrix, as shares of the mean over all of it, to four significant digits.

    There are at most `cells` along each side, which differ by one row or column at most.
    """
    wide = values.double()
    for dim in (0, 1):
        count = min(cells, wide.shape[dim])
        wide = torch.stack([part.mean(dim) for part in wide.tensor_split(count, dim)], dim)
    mean = float(values.double().mean())
    return [[float(f"{value / mean:.4g}") if mean > 0 else 0.0 for value in row] for row in wide.tolist()]


def share_of_largest(values: Tensor, share: float = LARGEST) -> float:
    """Return which share of the sum of a matrix its largest entries hold; 0 if the sum is zero.

    `share` is of all entries; at least one is taken.
    """
    flat = values.double().flatten()
    most = flat.topk(max(1, round(share * flat.numel()))).values.sum()
    total = float(flat.sum())
    return float(most) / total if total > 0 else 0.0


def count_by_importance(values: Tensor, keep: Tensor) -> dict[str, list[int]]:
    """Count the weights that stay, and those that go, by importance (rows, columns): bars of a histogram.

    There are 2 · FARTHEST / BIN + 1 bars. Bar i has weights whose importance is BIN · i − FARTHEST decibels above the
    mean of the matrix, give or take half a bar. The first and the last have all that lies beyond as well.
    """
    wide = values.double()
    levels = 10 * (wide / wide.mean().clamp_min(torch.finfo(wide.dtype).tiny)).log10()
    bars = ((levels.clamp(-FARTHEST, FARTHEST) + FARTHEST) / BIN).round().long()
    most = 2 * FARTHEST // BIN + 1
    return {
        name: torch.bincount(bars[chosen], minlength=most).tolist()
        for name, chosen in (("kept", keep), ("zeroed", ~keep))
    }


def importance_map(name: str, before: Tensor, after: Tensor, choose: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return what the report's `ImportanceMap` holds, from importance (rows, columns) before and after rotation.

    `choose` returns the mask of the weights that stay (rows, columns) by their importance.
    """
    rows, columns = before.shape
    return {
        "weight": name,
        "rows": rows,
        "columns": columns,
        "before": cell_means(before),
        "after": cell_means(after),
        "largest_before": share_of_largest(before),
        "largest_after": share_of_largest(after),
        "histograms": {
            when: count_by_importance(values, choose(values.double()))
            for when, values in (("before", before), ("after", after))
        },
    }


Side = Literal["residual", "heads"]

_STRIP = 1024
"""Columns of an inverse that are made together where its diagonal is all that is wanted."""


@dataclass(frozen=True)
class Term:
    """One linear layer as the rotations see it.

    Attributes:
        name: of its weight, for messages.
        weight: W (d_out, d_in), floating, with the gains of the norm before it absorbed.
        inputs: None for magnitude. Wanda: H (d_in, d_in) where `right` is rotated, else its diagonal (d_in,) will do.
            SparseGPT: the inverse of the damped Hessian (d_in, d_in), or the inverse's diagonal. Up to scale: the
            entropy does not see it. `sensitivity` makes it.
        left: what turns the rows: the residual stream, or KV heads of head_dim rows each.
        right: what turns the columns: the residual stream, or query heads of head_dim columns each.
    """

    name: str
    weight: Tensor
    inputs: Tensor | None
    left: Side | None
    right: Side | None


def sensitivity(
    gram: Tensor,
    backbone: Backbone,
    full: bool,
    damp: float = DAMP,
    *,
    released: int | None = None,
    name: str = "a linear layer",
) -> Tensor | None:
    """Return `Term.inputs` for a backbone, from the Gram H = Σ x xᵀ, scaled by H's mean diagonal entry m.

    Wanda: H / m. SparseGPT: (H / m + damp I)⁻¹. Magnitude: None. The result is float64. The damping is added before
    inverting, as SparseGPT's own is. An input that is always zero keeps only the damping: its weights count next to
    nothing.

    Args:
        full: whether the whole matrix is needed, for inputs that are rotated; else its diagonal.
        damp: share of the mean diagonal added to the diagonal, and more if that leaves the Hessian singular
            (`damping.damped_cholesky`). SparseGPT only.
        released: how many samples the Gram is of, for the importance that DenoiseRotator's released code computes:
            with the Hessian 2 H / samples, in which an input that is always zero has a diagonal entry of 1, it adds
            what it damped by to the inverse as well. With inputs of usual size this drowns the inverse's diagonal, and
            the importance is that of magnitude.
        name: of the layer, for the message.
    """
    if not 0 <= damp < float("inf"):
        raise ValueError(f"damping must be zero or more, not {damp}")
    if backbone == "magnitude":
        return None
    if not all_finite(gram):
        raise UserError(f"{name}: the Gram of its inputs is not finite; calibrate in float32 or on other data")
    if released is not None:
        gram = gram.double() * (2 / released)
        gram.diagonal()[gram.diagonal() == 0] = 1
    mean = live_mean(gram)
    hessian = gram.to(torch.float64, copy=True).div_(mean)
    if backbone == "wanda":
        return hessian if full else hessian.diagonal().clone()
    try:
        factor, damped = damped_cholesky(hessian, damp)
    except SingularHessianError as error:
        raise UserError(f"{name}: {error}") from error
    inverse: Tensor
    if full:
        inverse = torch.cholesky_inverse(factor)
    else:
        inverse = torch.cat([_inverse_diagonal(factor, start) for start in range(0, len(factor), _STRIP)])
    if released is not None:
        (inverse.diagonal() if full else inverse).add_(damped * mean**2)
    return inverse


def _inverse_diagonal(factor: Tensor, start: int) -> Tensor:
    """Return some entries of the diagonal of (L Lᵀ)⁻¹: the squared columns of L⁻¹, a few at a time."""
    count = min(_STRIP, len(factor) - start)
    columns = torch.zeros(len(factor), count, dtype=factor.dtype, device=factor.device)
    columns[start : start + count].fill_diagonal_(1)
    root: Tensor = torch.linalg.solve_triangular(factor, columns, upper=False)
    return root.square().sum(0)


def rotate_weight(
    weight: Tensor, left: Side | None, right: Side | None, residual: Tensor | None, heads: Tensor | None
) -> Tensor:
    """Return Lᵀ W R; a side without a rotation is left alone.

    The result is `weight` itself if nothing turns.

    Args:
        weight: W (d_out, d_in); heads are runs of head_dim rows (left) or columns (right).
        left: "residual": R1ᵀ W; "heads": R2ᵀ on each KV head's rows.
        right: "residual": W R1; "heads": each query head's columns by the R2 of its KV head. How many query heads
            share one is read off the width, which need not be d_model.
        residual: R1 (d, d) of the weight's dtype and device, or None to leave that side be.
        heads: R2 of each KV head (kv, head_dim, head_dim), or None.
    """
    if left == "residual" and residual is not None:
        _fits(weight.shape[0], residual.shape[-1], exact=True)
        weight = _multiply(residual.mT, weight)
    elif left == "heads" and heads is not None:
        count, size, _ = heads.shape
        _fits(weight.shape[0], count * size, exact=True)
        weight = _multiply(heads.mT, weight.view(count, size, -1)).view(weight.shape)
    if right == "residual" and residual is not None:
        _fits(weight.shape[1], residual.shape[-1], exact=True)
        weight = _multiply(weight, residual)
    elif right == "heads" and heads is not None:
        _fits(weight.shape[1], heads.shape[0] * heads.shape[1], exact=False)
        by_head = weight.view(len(weight), heads.shape[0], -1, heads.shape[1])
        weight = _multiply(by_head, heads, partial(torch.einsum, "okgi,kij->okgj")).reshape(weight.shape)
    return weight


def _multiply(a: Tensor, b: Tensor, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Tensor:
    """Return a product; of bfloat16 in float32 if that is faster: both add up exact products and round once."""
    if a.dtype != torch.bfloat16 or multiplies_bfloat16(a.device):
        return product(a, b)
    return product(a.float(), b.float()).to(a.dtype)


def _fits(width: int, of_rotation: int, *, exact: bool) -> None:
    if width % of_rotation or (exact and width != of_rotation):
        raise ValueError(f"a width of {width} does not fit a rotation of {of_rotation}")


def _rotated_diagonal(inputs: Tensor, right: Side | None, residual: Tensor | None, heads: Tensor | None) -> Tensor:
    """Return diag(Rᵀ `inputs` R), (d_in,): of a diagonal if nothing turns."""
    turns = (right == "residual" and residual is not None) or (right == "heads" and heads is not None)
    if not turns:
        return inputs if inputs.dim() == 1 else inputs.diagonal()
    if inputs.dim() != 2:
        raise ValueError("inputs that are rotated need their whole matrix, not its diagonal")
    if right == "residual":
        assert residual is not None
        return (_multiply(inputs, residual) * residual).sum(0)
    assert heads is not None
    count, size, _ = heads.shape
    _fits(len(inputs), count * size, exact=False)
    # Only the blocks of a head with itself reach the diagonal: (kv, group, head_dim, head_dim).
    queries = len(inputs) // size
    blocks = inputs.view(queries, size, queries, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    blocks = blocks.reshape(count, -1, size, size)
    return (_multiply(blocks, heads[:, None]) * heads[:, None]).sum(2).flatten()


def importance(term: Term, backbone: Backbone, residual: Tensor | None, heads: Tensor | None) -> Tensor:
    """Return the importance of the rotated weights of one linear layer (DenoiseRotator tables 5-7), up to scale.

    It is (d_out, d_in) of the weight's dtype, not negative. R1 is (d, d), and R2 (kv, head_dim, head_dim).
    """
    squares = rotate_weight(term.weight, term.left, term.right, residual, heads).square()
    if backbone == "magnitude":
        return squares
    if term.inputs is None:
        raise ValueError(f"{term.name}: {backbone} needs the inputs' moments")
    diagonal = _rotated_diagonal(term.inputs, term.right, residual, heads)
    return squares * diagonal if backbone == "wanda" else squares / diagonal


def entropy(importance: Tensor, dim: int) -> Tensor:
    """Return Σ over groups of −Σ p ln p, in nats, p the importance over its group's total (DenoiseRotator eq. 5-6).

    0 ln 0 is 0, a group without importance counts 0, and gradients are finite at both. Groups lie along `dim` of
    (d_out, d_in): 1 for rows, 0 for columns.
    """
    nats: Tensor = _Entropy.apply(importance, dim)  # type: ignore[no-untyped-call]
    return nats


class _Entropy(torch.autograd.Function):
    """Its gradient in closed form, ∂/∂s = −(ln p + H) / Σ s: autograd's own takes twice the passes over the weights."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", importance: Tensor, dim: int) -> Tensor:
        total = importance.sum(dim, keepdim=True)
        scale = torch.where(total > 0, total, 1.0).reciprocal_()
        p = importance * scale
        # A log from the smallest normal number up: zero times it is zero, and so is its product with ∂s/∂w = 2w.
        logs = p.clamp_min(torch.finfo(p.dtype).tiny).log_()
        of_groups = torch.linalg.vecdot(p, logs, dim=dim).neg_().unsqueeze(dim)
        ctx.save_for_backward(logs, of_groups, scale)
        # In bfloat16 the sum over groups would not see what a step changes.
        total_entropy: Tensor = of_groups.sum(dtype=torch.promote_types(of_groups.dtype, torch.float32))
        return total_entropy

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", grad: Tensor) -> tuple[Tensor, None]:
        logs, of_groups, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        return (logs + of_groups).mul_(scale.mul(-grad)), None


def entropy_within_groups(importance: Tensor, groups: int) -> Tensor:
    """Return Σ over rows of the entropy inside groups of M weights, once it is known which group (this project).

    A mask N:M chooses inside every M consecutive weights of a row, so only the entropy there says how little is lost.
    By the chain rule the entropy of a row is that of its groups' totals and Σ_g P_g H_g, with H_g the entropy inside
    group g and P_g the group's share of the row. The second part is returned, in nats: a group counts by its weight.
    """
    totals = importance.reshape(len(importance), -1, groups).sum(2)
    return entropy(importance, 1) - entropy(totals, 1)


def objective(
    terms: Sequence[Term],
    backbone: Backbone,
    residual: Tensor | None,
    heads: Tensor | None,
    *,
    groups: int | None = None,
) -> Tensor:
    """Return the loss of one block: the entropies of its rotated sides (eq. 9).

    They are over rows if the right side is rotated, over columns if the left is, and both if both are (section 3.3.2).
    A side whose rotation is None is not rotated. The result is in nats; it is zero, without a gradient, if no side is
    rotated.

    Args:
        terms: the block's linear layers, of the rotations' dtype and device.
        residual: R1 (d, d), or None.
        heads: R2 (kv, head_dim, head_dim), or None.
        groups: M of an N:M pattern: every term with a rotated side then counts `entropy_within_groups` instead.
    """
    has_side = {"residual": residual is not None, "heads": heads is not None}
    losses = []
    for term in terms:
        dims = [dim for dim, side in ((0, term.left), (1, term.right)) if side is not None and has_side[side]]
        if dims:
            values = importance(term, backbone, residual, heads)
            losses += (
                [entropy(values, dim) for dim in dims] if groups is None else [entropy_within_groups(values, groups)]
            )
    return torch.stack(losses).sum() if losses else torch.zeros(())
