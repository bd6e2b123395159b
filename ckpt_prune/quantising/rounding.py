"""GPTQ: round the weights of one input after another, and let those of later inputs make up for each rounding.

The method is that of Frantar et al. 2022, arXiv 2210.17323: with H the Gram of the inputs and H⁻¹ = UᵀU, the error of
the weights of input j, divided by U_jj, times U_j,later goes to the later ones. That is SparseGPT's update with
"rounded" in the place of "zero", and the factor is the same (`sparsity/inverse.py`). The scale and the zero of a block
are those that onnxruntime gives the block's weights when its first input is visited, moved as they are by then.
"""

import numpy as np
import torch
from torch import Tensor

from ckpt_prune.quantising.blocks import Array, Blocks, Grid, assembled, in_blocks, zeros_of
from ckpt_prune.sparsity.damping import DAMP
from ckpt_prune.sparsity.inverse import factorise, part


def rounded(matrix: Array, gram: Tensor, grid: Grid, *, damp: float = DAMP) -> Blocks:
    """Blocks of a matrix whose outputs on the inputs measured are near the matrix's own.

    Args:
        matrix: (K, N), float32 or float16.
        gram: (K, K), of its inputs, times any positive factor.
        grid: of the blocks.
        damp: share of the mean diagonal that is added to it.

    Raises:
        SingularHessianError: the Gram cannot be factorised with any damping.
    """
    factor, _ = factorise(gram, gram.diagonal() == 0, damp, 1.0)
    old = torch.tensor(matrix, dtype=torch.float64)
    new, change = old.clone(), torch.zeros_like(old)
    scales, zeros, codes = [], [], []
    for start in range(0, len(old), grid.block):
        here = slice(start, min(start + grid.block, len(old)))
        triangle = part(factor, here, here)
        U = torch.linalg.solve_triangular(triangle, torch.eye(len(triangle)).to(triangle), upper=True)
        if start:
            new[here].addmm_(U.T, part(factor, slice(0, start), here).T @ change[:start])
        found = in_blocks(new[here].to(torch.float32).numpy().astype(matrix.dtype), grid)
        scale = torch.from_numpy(found.scales[:, 0].astype(np.float64))
        zero = torch.from_numpy(zeros_of(found)[:, 0].astype(np.float64))
        taken = _visit(new[here], U, scale, zero, (1 << grid.bits) - 1)
        torch.sub(old[here], new[here], out=change[here])
        padding = torch.from_numpy(zeros_of(found)).expand(-1, grid.block - len(taken))
        codes.append(np.concatenate([taken.T.numpy(), padding.numpy()], 1).astype(np.uint8))
        scales.append(found.scales[:, 0])
        zeros.append(zeros_of(found)[:, 0].astype(np.uint8))
    return assembled(grid, len(old), np.stack(codes, 1), np.stack(scales, 1), np.stack(zeros, 1))


def _visit(W: Tensor, U: Tensor, scale: Tensor, zero: Tensor, most: int) -> Tensor:
    """Round inside one block, in place.

    Args:
        W: its weights with inputs as rows, (b, N) float64.
        U: its own part, (b, b).
        scale: (N,), zero where a block is all zeros.
        zero: (N,).
        most: the largest whole number there is.

    Returns:
        The whole numbers, (b, N).
    """
    codes = torch.empty_like(W)
    step = torch.where(scale == 0, 1.0, scale)
    for j in range(len(W)):
        codes[j] = torch.round(W[j] / step + zero).clamp_(0, most)
        near = (codes[j] - zero) * scale
        error = (W[j] - near) / U[j, j]
        W[j + 1 :].addr_(U[j, j + 1 :], error, alpha=-1)
        W[j] = near
    return codes
