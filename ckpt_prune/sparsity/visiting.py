"""Visit the inputs of a weight from first to last, the inputs after each change making up for it.

SparseGPT drops weights so, GPTQ rounds them (Frantar et al. 2022, arXiv 2210.17323; 2023, arXiv 2301.00774). With H the
Gram of the inputs and H⁻¹ = UᵀU, U upper triangular, a change of input j by w_j − ŵ_j moves those after it by
−((w_j − ŵ_j) / U_jj) U_j,later. `sparsegpt` says how that is computed without H⁻¹ or U: inputs are visited in runs, and
those before a run move it all at once, by what they have changed.

Weights have inputs as rows here: a visited input is contiguous.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ckpt_prune.sparsity.inverse import part

Visit = Callable[[Tensor, Tensor, slice], None]
"""Changes a run of inputs in place: given its weights (b, d_out), as the runs before have moved them, its own part of
U, (b, b), and which inputs they are."""


def visit_inputs(old: Tensor, factor: Tensor, run: int, visit: Visit) -> Tensor:
    """Visit all inputs of a weight, and return it, (d_in, d_out) float64.

    Args:
        old: the weight, (d_in, d_out) float64.
        factor: of H, as `inverse.factorise` gives it.
        run: inputs that are visited together.
    """
    new, change = old.clone(), torch.empty_like(old)
    for start in range(0, len(old), run):
        here = slice(start, min(start + run, len(old)))
        triangle = part(factor, here, here)
        U = torch.linalg.solve_triangular(triangle, torch.eye(len(triangle)).to(triangle), upper=True)
        if start:
            new[here].addmm_(U.T, part(factor, slice(0, start), here).T @ change[:start])
        visit(new[here], U, here)
        torch.sub(old[here], new[here], out=change[here])
    return new


def fix_in_turn(W: Tensor, U: Tensor, fix: Callable[[int, Tensor], Tensor]) -> None:
    """Give the inputs of a run their last values one after the other, in place.

    `fix` returns the values (d_out,) of the j-th input, given its weights as those before have moved them. W is (b,
    d_out), and U (b, b).
    """
    for j in range(len(W)):
        final = fix(j, W[j])
        W[j + 1 :].addr_(U[j, j + 1 :], (W[j] - final) / U[j, j], alpha=-1)
        W[j] = final
