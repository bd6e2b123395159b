"""Predict how much each type of each matrix of a GGUF file adds to the divergence of the model's output."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from torch.nn import functional

from ckpt_prune.budget.rounding_losses import predict_losses
from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.gguf.importance import Importance
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.rounding import round_rows
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model

TYPES = (Kind.Q8_0, Kind.Q6_K, Kind.Q5_K, Kind.Q4_K, Kind.IQ4_XS, Kind.Q3_K, Kind.IQ3_S, Kind.IQ3_XXS, Kind.Q2_K)
"""Types with blocks of 256 that are in question, besides those of 32."""
SMALL_TYPES = (Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.IQ4_NL, Kind.Q4_0)
"""Types for rows that do not divide by 256; q4_0 is as large as iq4_nl, and there to tell what mixtures of it lose."""


def types_for(columns: int) -> Sequence[Kind]:
    """Return the types in question for rows of so many columns; none if no type takes them."""
    return () if columns % 32 else SMALL_TYPES if columns % 256 else TYPES


def predict_type_losses(
    model: Model, samples: Samples, importance: Importance, chosen: GgufType, **how: Any
) -> dict[str, dict[Kind, float]]:
    """Predict what every type of every matrix of a file adds (`predict_losses`), in nats a token.

    Args:
        model: that the file is of.
        samples: a few, that the model is run on.
        importance: of the inputs of matrices, by their names in the file.
        chosen: type of the file, by which columns may be filled up.
        how: device and dtype that it is run in.
    """
    layout, sources = lay_out(model, chosen), find_sources(model, chosen)
    weights = {name: importance.get(file_name) for file_name, names in sources.items() for name in names}

    def round_all(name: str, rows: Tensor) -> dict[str, Tensor]:
        columns, weight = rows.shape[1], weights.get(name)
        filled = functional.pad(rows, (0, -columns % 32))
        fitting = weight if weight is not None and len(weight) == filled.shape[1] else None
        kinds = types_for(filled.shape[1])
        return {kind.name: round_rows(filled, kind, fitting)[:, :columns] for kind in kinds}

    by_weight = predict_losses(model, samples, round_all, **how)
    losses: dict[str, dict[Kind, float]] = {}
    for file_name, names in sources.items():
        weight = layout.tensors[file_name]
        known = [by_weight[name] for name in names if by_weight.get(name)]
        if len(known) < len(names):
            continue
        elements = sum(prod(model.checkpoint.tensors[name].shape) for name in names)
        share = min(1.0, prod(weight.shape) / elements)  # less, if a fused one was split
        kinds = [kind for kind in types_for(weight.shape[-1]) if all(kind.name in each for each in known)]
        losses[file_name] = {kind: share * sum(each[kind.name] for each in known) for kind in kinds}
    return losses


def find_sources(model: Model, chosen: GgufType) -> dict[str, list[str]]:
    """Return for every matrix of a file the on-disk names of the weights that it is made of."""
    read: list[str] = []

    def note(name: str) -> Tensor:
        read.append(name)
        return torch.zeros(()).expand(tuple(model.checkpoint.tensors[name].shape))

    sources: dict[str, list[str]] = {}
    for name, weight in lay_out(model, chosen, note).tensors.items():
        if len(weight.shape) == 2:
            read.clear()
            weight.read()
            sources[name] = list(dict.fromkeys(read))
    return sources
