"""Error feedback into GGUF's types: the columns of a weight are rounded in turn, and later ones make up for earlier.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) on the columns in their own order (`sparsity/visiting.py`). At the first
column of every block ggml itself chooses the block's scales and minima, by the importance of the inputs. It is given
the weights as the columns before have moved them. Only codes are chosen here: a block is what ggml could have written.
"""

from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ckpt_prune.rounding.codes import CodeGrid, decode, put_codes
from ckpt_prune.sparsity.damping import MOST_DAMP
from ckpt_prune.sparsity.inverse import factorise
from ckpt_prune.sparsity.visiting import fix_in_turn, visit_inputs

Array = np.ndarray[Any, Any]
ROWS = 8192
"""Rows that are rounded at once: four copies of them in float64 are held."""
LEAST = 1e-6
"""An input that was always zero matters so much of the mean: other text may use it."""

HEAD_DAMP = 0.1
"""The embedding is also what tokens begin with: its own weights must stay nearer than outputs alone would say."""


def importance_of(squares: Tensor) -> Array:
    """Return how much an error in each column matters, (columns,) float32, from the sums of squares of the inputs."""
    squares = squares.float()
    if not bool(squares.any()):
        return np.ones(len(squares), np.float32)
    return squares.div(squares.mean()).clamp_min_(LEAST).numpy()


def round_with_feedback(weight: Tensor, gram: Tensor, kinds: Sequence[Kind], damp: float) -> dict[Kind, Array]:
    """Round a weight to some types so that its outputs change least: type → its rows as ggml stores them.

    Each is rounded by itself. Types with blocks of one size go through the columns together: of few rows that takes
    half of the time. Rows of a type are (rows, bytes) uint8. Memory beyond the arguments: three float64 matrices of the
    Gram's size, and four of `ROWS` rows.

    Args:
        weight: (rows, columns); columns are a multiple of the types' blocks.
        gram: of its inputs, (columns, columns), times any positive factor.
        kinds: some of `CODES`.
        damp: share of the mean diagonal that is added to it.

    Raises:
        SingularHessianError: the Gram cannot be factorised with any damping.
    """
    diagonal = gram.diagonal()
    importance, (factor, _) = importance_of(diagonal), factorise(gram, diagonal == 0, damp, MOST_DAMP)
    by_size: dict[int, list[Kind]] = {}
    for kind in kinds:
        by_size.setdefault(gguf.GGML_QUANT_SIZES[kind][0], []).append(kind)
    found: dict[Kind, Array] = {}
    for alike in by_size.values():
        parts = [_round_rows(rows, factor, alike, importance) for rows in torch.split(weight, ROWS // len(alike))]
        found |= {kind: np.concatenate(own) for kind, own in zip(alike, zip(*parts, strict=True), strict=True)}
    return found


def _round_rows(weight: Tensor, factor: Tensor, kinds: Sequence[Kind], importance: Array) -> list[Array]:
    """Return some rows of a weight in each type: these have blocks of one size."""
    import libgguf

    (size,) = {gguf.GGML_QUANT_SIZES[kind][0] for kind in kinds}
    count, columns = weight.shape
    places = [slice(place * count, (place + 1) * count) for place in range(len(kinds))]
    encoded = [np.empty((count, columns // size, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8) for kind in kinds]

    def visit(W: Tensor, U: Tensor, here: slice) -> None:
        now = np.ascontiguousarray(W.T.float().numpy())
        own = zip(places, kinds, strict=True)
        blocks = [libgguf.quantize_rows(now[rows], kind, importance[here]) for rows, kind in own]
        grid, codes = CodeGrid.of(kinds, blocks), np.empty(now.shape, np.int16)

        def nearest(j: int, weights: Tensor) -> Tensor:
            chosen, values = grid.nearest(j, weights)
            codes[:, j] = chosen.numpy()
            return values

        fix_in_turn(W, U, nearest)
        for kind, rows, block, whole in zip(kinds, places, blocks, encoded, strict=True):
            whole[:, here.start // size] = put_codes(kind, block, codes[rows])

    stacked = weight.T.to(torch.float64).repeat(1, len(kinds))
    visit_inputs(stacked, factor, size, visit)
    return [whole.reshape(count, -1) for whole in encoded]


def output_error(weight: Tensor, encoded: Array, kind: Kind, gram: Tensor) -> float:
    """Return tr((W − Ŵ) G (W − Ŵ)ᵀ), what rounding has changed of the outputs on the inputs whose Gram G is."""
    lost = 0.0
    gram = gram.float()
    for start in range(0, len(weight), ROWS):
        rows = slice(start, start + ROWS)
        change = weight[rows].float() - decode(encoded[rows], kind)
        lost += float((change @ gram).mul_(change).sum(dtype=torch.float64))
    return lost
