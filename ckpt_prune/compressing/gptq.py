"""GPTQ: what rounding one column changes is made up for by the columns after it (Frantar et al. 2022, Algorithm 1).

It is SparseGPT with rounding in place of dropping: with H the Gram of the inputs and H⁻¹ = UᵀU, column j is rounded,
and the columns after it move by −((w_j − ŵ_j) / U_jj) U_j,later.
"""

import torch
from torch import Tensor

from ckpt_prune.compressing.rounding import codes_of
from ckpt_prune.compressing.scheme import Scheme

_BLOCK = 128
"""Columns that are updated at once by those before them."""


def gptq_codes(weight: Tensor, U: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Whole numbers under given scales that keep a weight's outputs, (rows, columns) int8; zeros stay zeros.

    Memory beyond the arguments: three float64 matrices of the weight's size.

    Args:
        weight: (rows, columns).
        U: of H, as `sparsity.inverse.inverse_factor` gives it, (columns, columns) float64.
        scales: of every group, as `scales_of` gives them, (rows, groups).
        scheme: how the weight is stored.
    """
    columns = weight.shape[1]
    own = scales.double().repeat_interleave(columns // scales.shape[1], dim=1)
    moved, zero = weight.double().clone(), weight == 0
    codes = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
    row = Scheme(scheme.format, None)
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        errors = torch.zeros(len(weight), end - start, dtype=torch.float64, device=weight.device)
        for j in range(start, end):
            codes[:, j] = codes_of(moved[:, j : j + 1], own[:, j : j + 1], row)[:, 0].masked_fill(zero[:, j], 0)
            errors[:, j - start] = (moved[:, j] - codes[:, j] * own[:, j]) / U[j, j]
            moved[:, j:end].addr_(errors[:, j - start], U[j, j:end], alpha=-1)
        moved[:, end:].addmm_(errors, U[start:end, end:], alpha=-1)
    return codes
