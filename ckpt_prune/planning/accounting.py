"""What a model costs: parameters, bytes on disk and FLOPs, from shapes alone."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from ckpt_prune.architectures.family import Family
from ckpt_prune.architectures.skeleton import is_stored_frequency

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Cost(BaseModel):
    """Size of one model.

    Attributes:
        parameters: a tied head counted once, stored rotary frequencies not at all.
        bytes: of its tensors on disk.
        flops: of one forward pass over `tokens` tokens, without a cache: two per multiply-add of every matrix product,
            attention scores unmasked, as `torch.utils.flop_counter` counts.
        tokens: see flops.
    """

    model_config = ConfigDict(frozen=True)

    parameters: int
    bytes: int
    flops: int
    tokens: int


def cost_of(family: Family, config: Any, shapes: Shapes) -> Cost:
    """The cost of a model whose tensors have these dtypes and shapes.

    Args:
        family: for the names of the head, the embedding and the attention output.
        config: the transformers config; its context length bounds the tokens that FLOPs are counted for.
        shapes: on-disk name → dtype and shape.
    """
    tokens = min(2048, int(config.max_position_embeddings))
    head, embedding = f"{family.head}.weight", f"{family.embedding}.weight"
    tied = bool(config.tie_word_embeddings)
    counted = [name for name in shapes if not (tied and name == head) and not is_stored_frequency(name)]
    parameters = sum(prod(shapes[name][1]) for name in counted)
    size = sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    multiplied = sum(prod(shape) for name, (_, shape) in shapes.items() if len(shape) == 2 and name != embedding)
    if head not in shapes:
        multiplied += prod(shapes[embedding][1])
    flops = 2 * tokens * multiplied
    for block in range(family.dimension(config, "layers")):
        # Scores and their product with the values: two products of (T, T) with every query head's dimensions.
        flops += 4 * tokens**2 * shapes[family.tensor(block, family.spaces["heads"].consumer)][1][1]
    return Cost(parameters=parameters, bytes=size, flops=flops, tokens=tokens)
