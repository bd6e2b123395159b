"""SparseGPT: drop weights by the optimal brain surgeon, and let the other weights of the row make up for them.

The method is Algorithm 1 of Frantar and Alistarh 2023, arXiv 2301.00774 (sparsity/README.md, section 3). Its U, the
upper Cholesky factor of H⁻¹ = UᵀU, is never formed. Its inverse is: H = R Rᵀ with R = U⁻¹ upper triangular is one
Cholesky factorisation of H, read from its last input to its first. The paper's errors E, with E_j = (w_j − ŵ_j) / U_jj,
obey E U = W − Ŵ. So the column groups before B move the weights of B by (W − Ŵ)_before R_before,B U_BB, where U_BB is
the inverse of a small triangle, R_BB. Departures from the released code are in section 4: mean(diag H) is over live
inputs only, and a pivot that is nothing but rounding counts as a failure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.zero_patterns import GroupPattern
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.sparsity.inverse import factorise
from ckpt_prune.sparsity.masks import check_width, keep_groups, keep_share
from ckpt_prune.sparsity.visiting import visit_inputs

BLOCK = 128
"""Inputs whose mask is chosen together where there is no pattern: the paper's B and B_s."""
STRIP = 16
"""Inputs updated together inside a block without a pattern. This is for speed: a whole block would leave the cache."""


@dataclass(frozen=True)
class PrunedWeight:
    """A weight after SparseGPT.

    Attributes:
        weight: (d_out, d_in) float64, exactly zero where dropped and at every dead input.
        keep: (d_out, d_in) bool, True = stays. Its counts are exact. Weights of dead inputs score 0 and go first. There
            may be more of them than have to go: the rest are True here and zero in `weight`.
        damp: the damping used, as a share of the mean diagonal of H.
        dead: number of inputs that were zero on every token.
    """

    weight: Tensor
    keep: Tensor
    damp: float
    dead: int


def prune_weight(
    weight: Tensor,
    hessian: Tensor,
    *,
    pattern: GroupPattern | None,
    ratio: float,
    block: int = BLOCK,
    damp: float = DAMP,
    most_damp: float = MOST_DAMP,
) -> PrunedWeight:
    """Drop a share of the weights, or all but N of every M, and update the others (SparseGPT, Algorithm 1).

    Memory beyond the arguments: two float64 matrices of H's size while factorising, one afterwards, and four of the
    weight's size.

    Args:
        weight: W, (d_out, d_in), any floating dtype.
        hessian: H, (d_in, d_in), any floating dtype: the Gram of the inputs times any positive factor.
        pattern: N:M, chosen group by group from weights already updated; None for unstructured.
        ratio: share that is dropped if there is no pattern. Every block of columns loses exactly `zeros_of(d_out *
            columns, ratio)`, in one ranking of all its rows. At 0 the weight is returned as it is.
        block: inputs in a block, raised to a multiple of M if there is a pattern.
        damp: share of the mean diagonal of H over live inputs that is added to the diagonal; zero is allowed.
        most_damp: the most damping that is tried if the factorisation fails (`damping.damped_cholesky`).
    """
    d_in = weight.shape[1]
    if hessian.shape != (d_in, d_in):
        raise ValueError(f"a Hessian of shape {tuple(hessian.shape)} does not fit a weight of {d_in} inputs")
    if block < 1 or not damp >= 0:
        raise ValueError(f"block must be at least 1 and damp at least 0, not {block} and {damp}")
    if pattern is not None:
        check_width(d_in, pattern)
        block = -(-block // pattern.of) * pattern.of
    if not all_finite(hessian):
        raise UserError(
            "the Hessian holds infinities or NaN: calibrate again in float32, and check the calibration data"
        )
    dead = hessian.diagonal() == 0
    if pattern is None and ratio == 0:
        return PrunedWeight(weight.double().clone(), torch.ones_like(weight, dtype=torch.bool), damp, int(dead.sum()))
    factor, damp = factorise(hessian, dead, damp, most_damp)
    old = weight.T.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    old[dead] = 0
    keep = torch.empty(old.shape, dtype=torch.bool, device=old.device)
    new = visit_inputs(old, factor, block, lambda W, U, here: _visit(W, keep[here], U, pattern, ratio))
    return PrunedWeight(new.T.contiguous(), keep.T.contiguous(), damp, int(dead.sum()))


def _visit(W: Tensor, keep: Tensor, U: Tensor, pattern: GroupPattern | None, ratio: float) -> None:
    """Choose and drop inside one block, in place.

    Args:
        W: weights of the block with its inputs as rows, (b, d_out) float64. The blocks before it have moved them.
        keep: (b, d_out) bool, written.
        U: (b, b) float64, the block's own part.
    """
    pivots = U.diagonal()[:, None]
    if pattern is None:
        # Ties go by index along the rows of the weight, so the ranking has to see the weight that way round.
        keep.copy_(keep_share((W / pivots).square_().T.contiguous(), ratio, "matrix").T)
    errors = torch.empty_like(W)
    strip = STRIP if pattern is None else pattern.of
    for start in range(0, len(W), strip):
        here = slice(start, min(start + strip, len(W)))
        if start:
            W[here].addmm_(U[:start, here].T, errors[:start], alpha=-1)
        if pattern is not None:
            keep[here] = keep_groups((W[here] / pivots[here]).square_().T.contiguous(), pattern).T
        for j in range(here.start, here.stop):
            # The inputs before may have moved this weight: its error is known only now.
            torch.div(W[j].masked_fill(keep[j], 0), pivots[j], out=errors[j])
            W[j + 1 : here.stop].addr_(U[j, j + 1 : here.stop], errors[j], alpha=-1)
    W.masked_fill_(~keep, 0)


def relative_error(weight: Tensor, pruned: Tensor, gram: Tensor) -> float:
    """Return tr((W − Ŵ) G (W − Ŵ)ᵀ) / tr(W G Wᵀ), the share of the output's energy that is lost; 0 if there is none."""
    gram = gram.double()
    lost = energy = 0.0
    for old, new in zip(torch.split(weight, 1024), torch.split(pruned, 1024), strict=True):
        rows = old.double()
        difference = rows - new.double()
        lost += float((difference @ gram).mul_(difference).sum())
        energy += float((rows @ gram).mul_(rows).sum())
    return max(lost, 0.0) / energy if energy > 0 else 0.0
