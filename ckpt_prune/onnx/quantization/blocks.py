"""Matrices in blocks of few bits, as onnxruntime's MatMulNBits and GatherBlockQuantized read them.

A matrix (K, N) that inputs are multiplied with from the left has K inputs and N outputs. The inputs of one output are
cut into blocks, each with a scale s and a zero z: a weight is s (q - z), q being a whole number of so many bits.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bits = Literal[4, 8]

SIZES = (16, 32, 64, 128, 256)
"""Block sizes that onnxruntime has kernels for."""


@dataclass(frozen=True)
class Grid:
    """How weights are rounded."""

    bits: Bits
    block: int
    symmetric: bool
    """The zero is the middle of the range, and not stored."""


@dataclass(frozen=True)
class Blocks:
    """A matrix (K, N) in blocks."""

    grid: Grid
    rows: int
    """K."""
    packed: Array
    """uint8 (N, blocks, bytes of a block): low bits first."""
    scales: Array
    """(N, blocks), of the matrix's own type."""
    zeros: Array | None
    """uint8 (N, bytes of all blocks): low bits first; None where the grid is symmetric."""

    @property
    def nbytes(self) -> int:
        """Size in a file."""
        return int(self.packed.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes))


def in_blocks(matrix: Array, grid: Grid) -> Blocks:
    """Round a matrix to the nearest, by onnxruntime's own quantiser.

    Args:
        matrix: float32 or float16 (K, N). A last block that K does not fill is padded with zeros.
        grid: how.
    """
    config, quantiser = _quantisers()
    kernel = quantiser(config(block_size=grid.block, is_symmetric=grid.symmetric, bits=grid.bits))
    packed, scales, zeros = kernel.qbits_block_quant(np.ascontiguousarray(matrix))
    return Blocks(grid, len(matrix), packed, scales, None if grid.symmetric else zeros)


def matrix_of(blocks: Blocks) -> Array:
    """The matrix (K, N) that stands in the blocks, float32."""
    values = codes_of(blocks).astype(np.float32)  # (N, blocks, block)
    values -= zeros_of(blocks)[..., None]
    values *= blocks.scales.astype(np.float32)[..., None]
    return np.ascontiguousarray(values.reshape(len(values), -1)[:, : blocks.rows].T)


def codes_of(blocks: Blocks) -> Array:
    """The whole numbers of the weights, uint8 (N, blocks, block)."""
    return _unpacked(blocks.packed, blocks.grid.bits)


def zeros_of(blocks: Blocks) -> Array:
    """The zero of each block, float32 (N, blocks)."""
    count = blocks.scales.shape[1]
    if blocks.zeros is None:
        return np.full((len(blocks.scales), count), 1 << (blocks.grid.bits - 1), np.float32)
    return _unpacked(blocks.zeros, blocks.grid.bits)[:, :count].astype(np.float32)


def assembled(grid: Grid, rows: int, codes: Array, scales: Array, zeros: Array) -> Blocks:
    """Blocks of whole numbers that were found elsewhere.

    Args:
        grid: of them.
        rows: K.
        codes: uint8 (N, blocks, block).
        scales: (N, blocks).
        zeros: uint8 (N, blocks).
    """
    stored = None if grid.symmetric else _packed(zeros, grid.bits)
    return Blocks(grid, rows, _packed(codes, grid.bits), scales, stored)


def _packed(values: Array, bits: int) -> Array:
    if bits == 8:
        return np.ascontiguousarray(values)
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], -1)
    packed: Array = values[..., 0::2] | (values[..., 1::2] << 4)
    return packed


def _unpacked(packed: Array, bits: int) -> Array:
    if bits == 8:
        return packed
    return np.stack([packed & 0xF, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


@functools.cache
def _quantisers() -> tuple[Any, Any]:
    """Onnxruntime's classes, imported without what importing them does to this process's logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        from onnxruntime.quantization import matmul_nbits_quantizer as own
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return own.DefaultWeightOnlyQuantConfig, own.DefaultWeightOnlyQuantizer
