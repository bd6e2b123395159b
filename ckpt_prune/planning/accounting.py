"""What a model costs: parameters, bytes on disk and FLOPs, from shapes alone."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from ckpt_prune.architectures.family import Family, patches
from ckpt_prune.architectures.skeleton import is_stored_buffer

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Cost(BaseModel):
    """Size of one model.

    Attributes:
        parameters: a tied head counted once, stored buffers not at all.
        bytes: of its tensors on disk.
        flops: of one forward pass over one sample of `tokens` tokens, without a cache: two per multiply-add of every
            matrix product and convolution, attention scores unmasked, as `torch.utils.flop_counter` counts.
        tokens: of a text, the context length, at most 2048; of an image, its patches and special tokens.
    """

    model_config = ConfigDict(frozen=True)

    parameters: int
    bytes: int
    flops: int
    tokens: int


def cost_of(family: Family, config: Any, shapes: Shapes) -> Cost:
    """The cost of a model whose tensors have these dtypes and shapes.

    Args:
        family: for what its modules do.
        config: the transformers config.
        shapes: on-disk name → dtype and shape.
    """
    tokens = family.tokens(config)
    head, embedding = f"{family.head}.weight", f"{family.on_disk(family.embedding or '')}.weight"
    tied = bool(getattr(config, "tie_word_embeddings", False))
    sizes = {name: prod(shape) for name, (_, shape) in shapes.items() if not is_stored_buffer(name)}
    parameters = sum(size for name, size in sizes.items() if not (tied and name.startswith(f"{family.head}.")))
    size = sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    flops = 0
    for name, numel in sizes.items():
        flops += 2 * numel * _applications(family, config, name, len(shapes[name][1]), tokens)
    if family.head is not None and head not in shapes:
        flops += 2 * tokens * prod(shapes[embedding][1])
    for block in range(family.dimension(config, "layers")):
        # Two products of (T, T): scores over every query head's dimensions, and their product with the values.
        values = shapes[family.tensor(block, family.columns["heads"].consumer)][1][1]
        queries = values if family.logits is None else shapes[family.tensor(block, family.logits.query)][1][0]
        flops += 2 * tokens**2 * (queries + values)
    return Cost(parameters=parameters, bytes=size, flops=flops, tokens=tokens)


def _applications(family: Family, config: Any, name: str, dimensions: int, tokens: int) -> int:
    """How often a tensor is multiplied in one forward pass."""
    module = name.rpartition(".")[0]
    if dimensions == 4:
        return patches(config)
    looked_up = any(name.startswith(f"{family.on_disk(path)}.") for path in family.lookups)
    if dimensions != 2 or looked_up:
        return 0
    return 1 if module in map(family.on_disk, family.pooled) else tokens
