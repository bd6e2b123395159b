"""GPTQ: round the weights of one input after another, and let those of later inputs make up for each rounding.

The method is that of Frantar et al. 2022, arXiv 2210.17323: with H the Gram of the inputs and H⁻¹ = UᵀU, the error of
the weights of input j, divided by U_jj, times U_j,later goes to the later ones. That is SparseGPT's update with
"rounded" in the place of "zero", and is computed alike (`sparsity/visiting.py`). The scale and the zero of a block
are those that onnxruntime gives the block's weights when its first input is visited, moved as they are by then.
"""

import numpy as np
import torch
from torch import Tensor

from ckpt_prune.onnx.quantization.blocks import Array, Blocks, Grid, assembled, in_blocks, zeros_of
from ckpt_prune.sparsity.damping import DAMP
from ckpt_prune.sparsity.inverse import factorise
from ckpt_prune.sparsity.visiting import fix_in_turn, visit_inputs


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
    scales: list[Array] = []
    zeros: list[Array] = []
    codes: list[Array] = []

    def visit(W: Tensor, U: Tensor, _here: slice) -> None:
        found = in_blocks(W.to(torch.float32).numpy().astype(matrix.dtype), grid)
        scale = torch.from_numpy(found.scales[:, 0].astype(np.float64))
        stored = zeros_of(found)
        zero, most = torch.from_numpy(stored[:, 0].astype(np.float64)), (1 << grid.bits) - 1
        step = torch.where(scale == 0, 1.0, scale)
        taken = torch.empty_like(W)

        def nearest(j: int, weights: Tensor) -> Tensor:
            taken[j] = torch.round(weights / step + zero).clamp_(0, most)
            return (taken[j] - zero) * scale

        fix_in_turn(W, U, nearest)
        padding = np.broadcast_to(stored, (len(stored), grid.block - len(taken)))
        codes.append(np.concatenate([taken.T.numpy(), padding], 1).astype(np.uint8))
        scales.append(found.scales[:, 0])
        zeros.append(stored[:, 0].astype(np.uint8))

    visit_inputs(torch.tensor(matrix, dtype=torch.float64), factor, grid.block, visit)
    return assembled(grid, len(matrix), np.stack(codes, 1), np.stack(scales, 1), np.stack(zeros, 1))
