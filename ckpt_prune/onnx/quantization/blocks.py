"""Matrices in blocks of few bits, as onnxruntime's MatMulNBits and GatherBlockQuantized read them.

A matrix (K, N) that inputs are multiplied with from the left has K inputs and N outputs. The inputs of one output are
cut into blocks, each with a scale s and a zero z: a weight is s (q - z), q being a whole number of so many bits.
"""

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ckpt_prune.sparsity.damping import DAMP
from ckpt_prune.sparsity.inverse import factorise_largest_first
from ckpt_prune.sparsity.steps import find_steps
from ckpt_prune.sparsity.visiting import fix_in_turn, visit_inputs

Array = NDArray[Any]
Bits = Literal[4, 8]


@dataclass(frozen=True)
class BlockRounding:
    """How weights are rounded."""

    bits: Bits
    block: int
    symmetric: bool
    """The zero is the middle of the range, and not stored."""


@dataclass(frozen=True)
class Blocks:
    """A matrix (K, N) in blocks."""

    grid: BlockRounding
    rows: int
    """K."""
    packed: Array
    """uint8 (N, blocks, bytes of a block): low bits first."""
    scales: Array
    """(N, blocks), of the matrix's own type."""
    zeros: Array | None
    """uint8 (N, bytes of all blocks): low bits first; None if the grid is symmetric."""

    def unpack_codes(self) -> Array:
        """Return the whole numbers q, uint8 (N, blocks, block)."""
        return _unpack(self.packed, self.grid.bits)

    def unpack_zeros(self) -> Array:
        """Return the zero of each block, float32 (N, blocks)."""
        count = self.scales.shape[1]
        if self.zeros is None:
            return np.full((len(self.scales), count), 1 << (self.grid.bits - 1), np.float32)
        return _unpack(self.zeros, self.grid.bits)[:, :count].astype(np.float32)

    def to_matrix(self) -> Array:
        """Return the matrix (K, N) of the rounded weights, float32."""
        values = self.unpack_codes().astype(np.float32)  # (N, blocks, block)
        values -= self.unpack_zeros()[..., None]
        values *= self.scales.astype(np.float32)[..., None]
        return np.ascontiguousarray(values.reshape(len(values), -1)[:, : self.rows].T)


def count_block_bytes(rows: int, columns: int, grid: BlockRounding, scale: int) -> int:
    """Return the bytes of a matrix (K, N) in blocks whose scales take so many each."""
    blocks = -(-rows // grid.block)
    zeros = 0 if grid.symmetric else -(-blocks * grid.bits // 8)
    return columns * (blocks * (grid.block * grid.bits // 8 + scale) + zeros)


def round_to_nearest(matrix: Array, grid: BlockRounding) -> Blocks:
    """Round a float32 or float16 matrix (K, N) by onnxruntime's own quantizer; a last block is padded with zeros.

    A matrix that was rounded to 4 bits before, in blocks that end where these end, keeps its weights.
    """
    if (kept := _keep_steps(matrix, grid)) is not None:
        return kept
    config, quantizer = _import_quantizer()
    kernel = quantizer(config(block_size=grid.block, is_symmetric=grid.symmetric, bits=grid.bits))
    packed, scales, zeros = kernel.qbits_block_quant(np.ascontiguousarray(matrix))
    return Blocks(grid, len(matrix), packed, scales, None if grid.symmetric else zeros)


def _keep_steps(matrix: Array, grid: BlockRounding) -> Blocks | None:
    """Return a matrix in blocks that hold its own weights, the zero in the middle of the range; None if none do."""
    if grid.bits != 4 or len(matrix) % grid.block:
        return None
    blocks = np.ascontiguousarray(matrix.T, np.float32).reshape(-1, grid.block)
    # Nearly every matrix is told by its first blocks.
    steps_and_codes = find_steps(blocks) if find_steps(blocks[:64]) is not None else None
    if steps_and_codes is None:
        return None
    shape = matrix.shape[1], len(matrix) // grid.block
    codes = (steps_and_codes[1] + 8).astype(np.uint8).reshape(*shape, grid.block)
    zeros = None if grid.symmetric else np.full((shape[0], -(-shape[1] // 2)), 0x88, np.uint8)
    return Blocks(grid, len(matrix), _pack(codes, 4), steps_and_codes[0].reshape(shape).astype(matrix.dtype), zeros)


def round_by_gptq(matrix: Array, gram: Tensor, grid: BlockRounding, *, damp: float = DAMP) -> Blocks:
    """Round the weights of one input after another, and let those of later inputs make up for each error.

    GPTQ (Frantar et al. 2022, arXiv 2210.17323): with H the Gram of the inputs and H⁻¹ = UᵀU, the error of the weights
    of input j, divided by U_jj, times U_j,later goes to the later ones. That is SparseGPT's update with "rounded" in
    the place of "zero" (`sparsity/visiting.py`). Inputs of large energy come first; scales and zeros are those that
    onnxruntime gives the matrix as it is.

    Args:
        matrix: (K, N), float32 or float16.
        gram: (K, K), of its inputs, times any positive factor.
        damp: share of the mean diagonal that is added to it.

    Raises:
        SingularHessianError: the Gram cannot be factorised with any damping.
    """
    ordered = factorise_largest_first(gram, damp, 1.0)
    inputs = ordered.order.tolist()
    nearest = round_to_nearest(matrix, grid)
    codes = nearest.unpack_codes().reshape(matrix.shape[1], -1)
    scales = torch.from_numpy(nearest.scales.T.astype(np.float64))  # (blocks, N)
    zeros, most = torch.from_numpy(nearest.unpack_zeros().T.astype(np.float64)), (1 << grid.bits) - 1

    def visit(W: Tensor, U: Tensor, here: slice) -> None:
        def round_input(j: int, weights: Tensor) -> Tensor:
            at = inputs[here.start + j]
            scale, zero = scales[at // grid.block], zeros[at // grid.block]
            rounded = torch.round(weights / torch.where(scale == 0, 1.0, scale) + zero).clamp_(0, most)
            codes[:, at] = rounded.numpy()
            return (rounded - zero) * scale

        fix_in_turn(W, U, round_input)

    visit_inputs(torch.tensor(matrix, dtype=torch.float64)[ordered.order], ordered.factor, grid.block, visit)
    return replace(nearest, packed=_pack(codes.reshape(*nearest.scales.shape, grid.block), grid.bits))


def _pack(values: Array, bits: int) -> Array:
    if bits == 8:
        return np.ascontiguousarray(values)
    packed: Array = values[..., 0::2] | (values[..., 1::2] << 4)
    return packed


def _unpack(packed: Array, bits: int) -> Array:
    if bits == 8:
        return packed
    return np.stack([packed & 0xF, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


@functools.cache
def _import_quantizer() -> tuple[Any, Any]:
    """Onnxruntime's classes, imported without what importing them does to this process's logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        from onnxruntime.quantization import matmul_nbits_quantizer as module
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return module.DefaultWeightOnlyQuantConfig, module.DefaultWeightOnlyQuantizer
