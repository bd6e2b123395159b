"""The codes of GGUF's types: where a block keeps them, and which weight each stands for (ggml-quants.c of llama.cpp).

A block of columns holds scales (and minima), and a code for each column. A weight is base + step · level(code): base
and step follow from the scales, and the level is the code itself, or an entry of a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

Array = np.ndarray[Any, Any]
_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of iq4_nl and iq4_xs."""


@dataclass(frozen=True)
class Field:
    """Bits of every code of a block.

    Attributes:
        start: byte of the block where they begin.
        run: bytes that hold one place of consecutive columns.
        places: how many places of `width` bits each byte has. Byte b of a run holds columns b, b + run, b + 2 run, …
        width: bits of a place.
        shift: the lowest bit of the code that they hold.
    """

    start: int
    run: int
    places: int
    width: int
    shift: int = 0


@dataclass(frozen=True)
class Codes:
    """The codes of a type.

    Attributes:
        fields: which hold them.
        least, most: the smallest and the largest code; those of q8_0 are bytes with a sign, and -128 is no code of it.
        table: levels of codes, if they are not the codes themselves.
    """

    fields: tuple[Field, ...]
    least: int
    most: int
    table: tuple[int, ...] | None = None


def _nibbles(start: int) -> Field:
    return Field(start, 16, 2, 4)


CODES: Mapping[Kind, Codes] = {
    Kind.Q4_0: Codes((_nibbles(2),), 0, 15),
    Kind.Q4_1: Codes((_nibbles(4),), 0, 15),
    Kind.Q5_0: Codes((_nibbles(6), Field(2, 4, 8, 1, 4)), 0, 31),
    Kind.Q5_1: Codes((_nibbles(8), Field(4, 4, 8, 1, 4)), 0, 31),
    Kind.Q8_0: Codes((Field(2, 32, 1, 8),), -127, 127),
    Kind.IQ4_NL: Codes((_nibbles(2),), 0, 15, _TABLE),
    Kind.IQ4_XS: Codes((_nibbles(8),), 0, 15, _TABLE),
    Kind.Q2_K: Codes((Field(16, 32, 4, 2),), 0, 3),
    Kind.Q3_K: Codes((Field(32, 32, 4, 2), Field(0, 32, 8, 1, 2)), 0, 7),
    Kind.Q4_K: Codes((Field(16, 32, 2, 4),), 0, 15),
    Kind.Q5_K: Codes((Field(48, 32, 2, 4), Field(16, 32, 8, 1, 4)), 0, 31),
    Kind.Q6_K: Codes((Field(0, 64, 2, 4), Field(128, 32, 4, 2, 4)), 0, 63),
}
"""Type → its codes. Types that are not here (iq1_s to iq3_s) hold entries of codebooks of several weights."""
_QH_IN_ORDER = (Kind.Q5_0, Kind.Q5_1)
"""Types whose high bits are in the order of columns, eight in a byte."""


@cache
def _levels(table: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the levels of a table, and what lies halfway between each and the next, float64."""
    levels = torch.tensor(table, dtype=torch.float64)
    return levels, (levels[1:] + levels[:-1]) / 2


def put_codes(kind: Kind, blocks: Array, codes: Array) -> Array:
    """Return blocks with other codes and the same scales.

    Args:
        kind: type of `CODES`.
        blocks: (…, bytes of a block) uint8.
        codes: (…, columns of a block), from `least` to `most` of the type.
    """
    new, columns = blocks.copy(), codes.shape[-1]
    shape = codes.shape[:-1]
    unsigned = codes.astype(np.int16).astype(np.uint8)
    for field in CODES[kind].fields:
        bits = (unsigned >> field.shift) & ((1 << field.width) - 1)
        size = columns * field.width // 8
        if kind in _QH_IN_ORDER and field.width == 1:
            packed = np.packbits(bits, axis=-1, bitorder="little")
        else:
            parts = bits.reshape(*shape, -1, field.places, field.run)
            shifts = (np.arange(field.places, dtype=np.uint8) * field.width)[:, None]
            packed = np.bitwise_or.reduce(parts << shifts, axis=-2).reshape(*shape, size)
        new[..., field.start : field.start + size] = packed
    return new


def decode(encoded: Array, kind: Kind) -> Tensor:
    """Return the weights of rows as ggml stores them, (rows, bytes) uint8 → (rows, columns) float32, by ggml itself."""
    import libgguf

    return torch.from_numpy(libgguf.dequantize_rows(encoded, kind)).reshape(len(encoded), -1)


@dataclass(frozen=True)
class CodeGrid:
    """The weights that codes of blocks stand for, as their scales are.

    Attributes:
        base, step: (columns of a block, rows) float64: a weight is base + step · level.
        bounds: the smallest and the largest code of each row, (2, rows) float64.
        tables: rows whose levels are in a table → the table.
    """

    base: Tensor
    step: Tensor
    bounds: Tensor
    tables: Sequence[tuple[slice, tuple[int, ...]]]

    @classmethod
    def of(cls, kinds: Sequence[Kind], blocks: Sequence[Array]) -> "CodeGrid":
        """Read the grid of one block of every row, (rows, bytes) for each type: ggml's own decoding of two codes.

        The rows of all types stand one after the other. Their blocks have equally many columns.
        """
        bases, steps, bounds, tables, start = [], [], [], [], 0
        for kind, own in zip(kinds, blocks, strict=True):
            codes = CODES[kind]
            first, last = codes.least, codes.most
            levels = (first, last) if codes.table is None else (codes.table[first], codes.table[last])
            columns = gguf.GGML_QUANT_SIZES[kind][0]
            low, high = (
                decode(put_codes(kind, own, np.full((len(own), columns), code)), kind).double().T.contiguous()
                for code in (first, last)
            )
            steps.append((high - low) / (levels[1] - levels[0]))
            bases.append(low - steps[-1] * levels[0])
            bounds.append(torch.tensor([[first], [last]], dtype=torch.float64).expand(2, len(own)))
            if codes.table is not None:
                tables.append((slice(start, start + len(own)), codes.table))
            start += len(own)
        return cls(torch.cat(bases, 1), torch.cat(steps, 1), torch.cat(bounds, 1), tables)

    def nearest(self, column: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes nearest to weights (rows,) of a column, int16, and the weights that they stand for."""
        base, step = self.base[column], self.step[column]
        scaled = (weights - base) / torch.where(step == 0, 1.0, step)
        codes = scaled.round().clamp_(self.bounds[0], self.bounds[1])
        values = codes.clone() if self.tables else codes
        for rows, table in self.tables:
            levels, halves = _levels(table)
            codes[rows] = chosen = torch.bucketize(scaled[rows], halves)
            values[rows] = levels[chosen]
        return codes.to(torch.int16), base + step * values
