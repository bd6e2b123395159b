"""GPTQ: the columns after each rounded one make up for it (Frantar et al. 2022, Algorithm 1).

It is SparseGPT with rounding in place of dropping, and is computed alike (`sparsity/visiting.py`).
"""

import torch
from torch import Tensor

from ckpt_prune.sparsity.visiting import fix_in_turn, visit_inputs
from ckpt_prune.stages.quantize.rounding import codes_of
from ckpt_prune.stages.quantize.scheme import PackingScheme

_BLOCK = 128
"""Columns that are updated at once by those before them."""


def gptq_codes(weight: Tensor, factor: Tensor, scales: Tensor, scheme: PackingScheme) -> Tensor:
    """Round a weight under given scales so that its outputs change least: (rows, columns) int8; zeros stay zeros.

    Memory beyond the arguments: three float64 matrices of the weight's size.

    Args:
        weight: (rows, columns).
        factor: of H, as `sparsity.inverse.factorise` gives it, (columns, columns) float64.
        scales: of every group, as `scales_of` gives them, (rows, groups).
    """
    old = weight.T.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    steps, size = scales.T.double(), weight.shape[1] // scales.shape[1]
    codes = torch.zeros(old.shape, dtype=torch.int8, device=weight.device)
    row = PackingScheme(scheme.format, None)

    def visit(W: Tensor, U: Tensor, here: slice) -> None:
        def nearest(j: int, weights: Tensor) -> Tensor:
            at = here.start + j
            step = steps[at // size]
            codes[at] = codes_of(weights[:, None], step[:, None], row)[:, 0].masked_fill(old[at] == 0, 0)
            return codes[at] * step

        fix_in_turn(W, U, nearest)

    visit_inputs(old, factor, _BLOCK, visit)
    return codes.T.contiguous()
