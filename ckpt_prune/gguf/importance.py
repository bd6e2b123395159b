"""How much each input of a matrix matters when it is rounded: the mean square of that input over text.

An error e in the weights of one output moves it by e · x: by Σ e² E[x²] on average, if inputs are uncorrelated.
llama.cpp calls E[x²] of all matrices an importance matrix ("imatrix"). `calibrate` measures it here, and llama.cpp's
own tool there.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from ckpt_prune.checkpoint.staging import staged_file
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.gguf.contents import Layout
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.rounding import Array, require_ggml
from ckpt_prune.gguf.types import is_matrix
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.rounding.feedback import LEAST

Importance = Mapping[str, Array]
"""Name of a matrix in the file → mean square of each of its inputs, (columns,) float32; of experts one row for each."""


def importance_of_statistics(statistics: Statistics, model: Model, kind: GgufType | None = None) -> Importance:
    """Return the importance that a model's statistics tell of the matrices of its GGUF file.

    Args:
        statistics: of this model; with `linears` among what was collected, else they know two matrices of a block.
        model: whose file it is for.
        kind: type of the file, by which columns may be filled up.

    Raises:
        UserError: the statistics are of another model, or do not know the inputs of all matrices.
    """
    statistics.check_model(model)
    if "linears" not in statistics.index.collect:
        raise UserError(
            f"{statistics.folder} does not hold the inputs of all matrices: measure again, with --collect "
            "moments,linears or without --collect"
        )
    squares: dict[str, Tensor] = {}
    for block in range(model.blocks):
        readers = {model.moments_name(block, first): modules for first, modules in model.family.inputs.items()}
        for name, folds in statistics.read_moments(block, readers, grams=False).items():
            moments = sum_folds(folds)
            assert isinstance(moments, Moments)
            measured = moments.square / max(1, moments.count)
            squares |= {model.family.tensor(block, module): measured for module in readers[name]}
    layout = lay_out(model, kind, partial(_read_squares, model, squares))
    found: dict[str, Array] = {}
    for name, weight in layout.tensors.items():
        if is_matrix(name, weight) and name.startswith("blk."):
            columns = weight.read().float().abs().amax(-2)
            if bool(columns.any()):
                means = columns.mean(-1, keepdim=True)
                # Of an expert that no token reached all inputs count alike.
                found[name] = columns.clamp_min(LEAST * means).where(means > 0, 1.0).numpy()
    return found


def _read_squares(model: Model, squares: Mapping[str, Tensor], name: str) -> Tensor:
    """Stand in for a weight: every row is the mean squares of its inputs, so that it is laid out as the weight is."""
    rows = squares.get(name, torch.zeros(()))
    return rows.float().expand(tuple(model.checkpoint.tensors[name].shape))


def read_imatrix(file: Path, layout: Layout) -> Importance:
    """Read an importance matrix that llama.cpp's tool or `statistics export` wrote, for a file of this layout.

    Raises:
        UserError: the file is damaged, of another model, or of matrices of another width.
    """
    if not file.is_file():
        raise UserError(
            f"{file} is no file: --imatrix takes what llama-imatrix or `ckpt-prune statistics export` wrote"
        )
    require_ggml(f"{file} is read")
    import libgguf

    try:
        entries = libgguf.load_imatrix(file)
    except (OSError, ValueError, EOFError, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no importance matrix of llama.cpp, or damaged: {error}") from error
    weights = {name: np.ravel(values) for name, values in entries.items() if name in layout.tensors}
    if not weights:
        raise UserError(f"{file} knows none of this model's matrices: it was measured on another model")
    for name, values in weights.items():
        shape = layout.tensors[name].shape
        width = math.prod((*shape[:-2], shape[-1]))
        if len(values) != width:
            raise UserError(
                f"{file}: {name} has {len(values)} inputs, and {width} in this model: it was measured on another one "
                "(measure the pruned model itself)"
            )
        weights[name] = values.reshape(*shape[:-2], shape[-1])
        if not np.isfinite(values).all() or (values < 0).any():
            raise UserError(f"{file}: {name} holds NaN, Inf or numbers below zero: measure again")
    return {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in weights.items() if values.any()}


def write_imatrix(out: Path, statistics: Statistics, model: Model) -> Importance:
    """Write an importance matrix as llama.cpp's tool does (GGUF), so that `llama-quantize --imatrix` reads it.

    Raises:
        UserError: the statistics are of another model, or lack inputs of matrices; or the disk is full.
    """
    importance = importance_of_statistics(statistics, model)
    tokens = statistics.index.tokens
    with staged_file(out) as (place, _):
        writer = gguf.GGUFWriter(place, "imatrix")
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", statistics.index.data)
        writer.add_uint32("imatrix.chunk_count", statistics.index.samples)
        writer.add_uint32("imatrix.chunk_size", statistics.index.window or 1)
        for name, values in importance.items():
            rows = np.atleast_2d(values)
            writer.add_tensor(f"{name}.in_sum2", rows * np.float32(tokens))
            writer.add_tensor(f"{name}.counts", np.full((len(rows), 1), tokens, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return importance
