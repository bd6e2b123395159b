"""Predict how much each type of each matrix of a GGUF file adds to the divergence of the model's output."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from torch.nn import functional

from ckpt_prune.budget.rounding_losses import (
    FED,
    Noise,
    left_by_feedback,
    measure_rerouting,
    name_of_head,
    predict_losses,
)
from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.gguf.gguf_weight import GgufWeight
from ckpt_prune.gguf.importance import Importance
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.rounding import Array, round_rows
from ckpt_prune.gguf.types import is_matrix
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model
from ckpt_prune.rounding.codes import CODES, decode
from ckpt_prune.rounding.damping import damp_for
from ckpt_prune.rounding.feedback import HEAD_DAMP, round_with_feedback
from ckpt_prune.sparsity.damping import DAMP

TYPES = (Kind.Q8_0, Kind.Q6_K, Kind.Q5_K, Kind.Q4_K, Kind.IQ4_XS, Kind.Q3_K, Kind.IQ3_S, Kind.IQ3_XXS, Kind.Q2_K)
"""Types with blocks of 256 that are in question, besides those of 32."""
SMALL_TYPES = (Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.IQ4_NL, Kind.Q4_0)
"""Types for rows that do not divide by 256; q4_0 is as large as iq4_nl, and there to tell what mixtures of it lose."""
_INPUTS = {size: f"inputs in blocks of {size}" for size in (32, 256)}

Grams = Mapping[str, Moments]
"""On-disk name of a weight → moments of its inputs, with the Gram, on samples that losses are not predicted on."""
Losses = dict[str, dict[Kind, float]]
"""Name of a matrix in the file → type → divergence that it adds, in nats a token."""


@dataclass(frozen=True)
class TypeLosses:
    """Predicted loss of each type, including that of llama.cpp's rounding of what matrices read.

    Attributes:
        weighed: rounded by ggml with the importance of inputs.
        fitted: rounded by error feedback where that loses less.
        rerouting: c of what other choices of routers add to the sum K of losses, c √K (`measure_rerouting`).
    """

    weighed: Losses
    fitted: Losses
    rerouting: float = 0.0

    def note(self) -> dict[str, Any]:
        """Return what a journal keeps."""
        ways: dict[str, Any] = {
            way: {name: {kind.name: value for kind, value in own.items()} for name, own in losses.items()}
            for way, losses in (("weighed", self.weighed), ("fitted", self.fitted))
        }
        return ways | {"rerouting": self.rerouting}

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> "TypeLosses":
        """Read what `note` returned."""
        weighed, fitted = (
            {name: {Kind[kind]: value for kind, value in own.items()} for name, own in note[way].items()}
            for way in ("weighed", "fitted")
        )
        return cls(weighed, fitted, note["rerouting"])


def types_for(columns: int) -> Sequence[Kind]:
    """Return the types in question for rows of so many columns; none if no type takes them."""
    return () if columns % 32 else SMALL_TYPES if columns % 256 else TYPES


def predict_type_losses(
    model: Model, samples: Samples, importance: Importance, chosen: GgufType, *, grams: Grams | None = None, **how: Any
) -> TypeLosses:
    """Predict what every type of every matrix of a file adds (`predict_losses`), in nats a token.

    Error feedback is tried on the weights in `grams`, which may be those of a few blocks and the head. A matrix of
    another block keeps the share that error feedback leaves of the loss of the same matrix in these. MXFP4 is in
    question of what is stored in it, which it holds as it is.

    Args:
        model: that the file is of.
        samples: a few, that the model is run on.
        importance: of the inputs of matrices, by their names in the file.
        chosen: type of the file, by which columns may be filled up.
        how: device and dtype that it is run in.
    """
    known, head = grams or {}, name_of_head(model)
    layout, sources = lay_out(model, chosen), find_sources(model, chosen)
    weights = {
        name: of_part
        for file_name, parts in sources.items()
        for part, of_part in zip(parts, _by_part(importance.get(file_name), len(parts)), strict=True)
        for name in part
    }

    stored = model.checkpoint.tensors

    def kinds_for(names: Iterable[str], columns: int) -> list[Kind]:
        in_fp4 = all((scaled := stored[name].scaled) is not None and scaled.fp4 for name in names)
        return [*types_for(columns), *([Kind.MXFP4] if in_fp4 and columns % 32 == 0 else [])]

    def round_all(name: str, rows: Tensor) -> dict[str, Tensor]:
        columns, weight = rows.shape[1], weights.get(name)
        filled = functional.pad(rows, (0, -columns % 32))
        fitting = weight if weight is not None and len(weight) == filled.shape[1] else None
        kinds = kinds_for([name], filled.shape[1])
        rounded = {kind.name: round_rows(filled, kind, fitting)[:, :columns] for kind in kinds}
        if name in known and filled.shape == rows.shape:
            least, inputs = HEAD_DAMP if name == head else DAMP, known[name]
            damp = damp_for(columns, inputs.count, least)
            assert inputs.gram is not None
            encoded = round_with_feedback(rows, inputs.gram, [kind for kind in kinds if kind in CODES], damp)
            rounded |= {kind.name + FED: decode(own, kind) for kind, own in encoded.items()}
        return rounded

    ways = {name: partial(round_inputs, size=size) for size, name in _INPUTS.items()}
    noise: Noise = {}
    by_weight = predict_losses(model, samples, round_all, round_inputs=ways, noise=noise, **how)
    fed = left_by_feedback(model, by_weight)
    found = TypeLosses({}, {}, measure_rerouting(model, samples, by_weight, noise, **how))
    for file_name, parts in sources.items():
        weight, names = layout.tensors[file_name], list(dict.fromkeys(name for part in parts for name in part))
        if not all(by_weight.get(name) for name in names) or not types_for(weight.shape[-1]):
            continue  # its rows divide into blocks of no type, and stay in float16
        elements = sum(prod(stored[name].shape) for name in names)
        share = min(1.0, prod(weight.shape) / elements)  # less, if a fused one was split
        in_question = kinds_for(names, weight.shape[-1])
        kinds = [kind for kind in in_question if all(kind.name in by_weight[name] for name in names)]
        for losses, shares in ((found.weighed, {}), (found.fitted, fed)):
            losses[file_name] = {
                kind: share * sum(_lost(by_weight[name], kind, shares.get(name, {})) for name in names)
                for kind in kinds
            }
    return found


def _lost(by_kind: Mapping[str, float], kind: Kind, shares: Mapping[str, float]) -> float:
    of_inputs = by_kind.get(_INPUTS[GGML_QUANT_SIZES[kind][0]], 0.0)
    return by_kind[kind.name] * shares.get(kind.name, 1.0) + of_inputs


def round_inputs(inputs: Tensor, size: int) -> Tensor:
    """Return inputs (…, columns) as llama.cpp multiplies them with rounded weights: in 8 bits with a scale for `size`.

    Its types with blocks of 32 take them as q8_0 or q8_1, those with blocks of 256 as q8_K (ggml-quants.c). Columns
    that fill no block stay.
    """
    if inputs.shape[-1] % size:
        return inputs
    blocks = inputs.reshape(*inputs.shape[:-1], -1, size)
    step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(inputs.dtype).tiny)
    return (blocks / step).round_().mul_(step).flatten(-2)


def find_sources(model: Model, chosen: GgufType) -> dict[str, list[list[str]]]:
    """Return for every matrix of a file, or each expert's of a stack, the on-disk names of what it is made of."""
    read: list[str] = []

    def note(name: str) -> Tensor:
        read.append(name)
        return torch.zeros(()).expand(tuple(model.checkpoint.tensors[name].shape))

    def names_of(weight: GgufWeight) -> list[str]:
        read.clear()
        weight.read()
        return list(dict.fromkeys(read))

    tensors = lay_out(model, chosen, note).tensors
    return {
        name: [names_of(part) for part in weight.parts or (weight,)]
        for name, weight in tensors.items()
        if is_matrix(name, weight)
    }


def _by_part(importance: Array | None, parts: int) -> Iterable[Array | None]:
    return [None] * parts if importance is None else np.atleast_2d(importance)
