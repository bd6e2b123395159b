"""The cost of a model, from shapes alone: parameters, bytes on disk, FLOPs, and its cache of keys and values."""

from math import prod

import torch

from ckpt_prune.job.records import Cost
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.context import patches
from ckpt_prune.model.factors import factor_names
from ckpt_prune.model.model import Model, TensorSpecs
from ckpt_prune.model.skeleton import is_parameter, stock_names


def cost_of(model: Model, shapes: TensorSpecs | None = None) -> Cost:
    """Return the cost of a model, also of one with the same family and config whose tensors have other shapes.

    Args:
        shapes: on-disk name → dtype and shape; the checkpoint's own by default.
    """
    family, tokens = model.family, model.tokens
    shapes = model.shapes if shapes is None else shapes
    head, embedding = f"{family.head}.weight", f"{family.on_disk(family.embedding or '')}.weight"
    sizes = {name: prod(shape) for name, (_, shape) in shapes.items() if is_parameter(name)}
    # A head's bias is tied in some classes (BERT's) and its own in others (DistilBERT's).
    tied: frozenset[str] = frozenset()
    if model.tied and model.has_remote_code:
        tied = stored_container(model.checkpoint).names().tied
    elif model.tied:
        tied = stock_names(model.checkpoint.config, family.architecture).tied
    parameters = sum(size for name, size in sizes.items() if name not in tied)
    size = sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    probe = family.architectures[family.architecture].probe
    flops = 0
    for name, numel in sizes.items():
        if name == f"{probe}.in_proj_weight":
            # A query, and keys and values of every token; then two products of it with them.
            flops += 2 * numel // 3 * (1 + 2 * tokens) + 4 * tokens * shapes[name][1][1]
        else:
            flops += 2 * numel * _applications(model, name, len(shapes[name][1]))
    if family.head is not None and head not in shapes:
        flops += 2 * tokens * prod(shapes[embedding][1])
    cache = 0
    for block in range(model.blocks):
        attention = family.attention
        if attention.latent:
            keys, mixed = (
                _whole(shapes, model.tensor(block, attention.key)),
                _whole(shapes, model.tensor(block, attention.output)),
            )
            flops += 2 * tokens**2 * (model.dimension("query_heads") * model.dimension("logits") + mixed[1][1])
            cache += keys[1][0] * keys[0].itemsize
            continue
        queries, keys, values = (
            _whole(shapes, model.tensor(block, each)) for each in (attention.query, attention.key, attention.value)
        )
        columns = _whole(shapes, model.tensor(block, attention.output))[1][1]
        fused = attention.query == attention.value
        # Two products of (T, T): scores over every query head's dimensions, and their product with the values.
        flops += 2 * tokens**2 * (columns if fused else queries[1][0]) + 2 * tokens**2 * columns
        kept = queries[1][0] - columns if fused else keys[1][0] + values[1][0]
        cache += kept * values[0].itemsize
    return Cost(parameters=parameters, bytes=size, flops=flops, tokens=tokens, cache=cache if family.causal else None)


def _whole(shapes: TensorSpecs, weight: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a linear's weight, also if it is the product of two."""
    if weight in shapes:
        return shapes[weight]
    down, up = factor_names(weight)
    return shapes[up][0], (shapes[up][1][0], shapes[down][1][1])


def _applications(model: Model, name: str, dimensions: int) -> int:
    """Return how often a tensor is multiply_factors in one forward pass."""
    family, module = model.family, name.rpartition(".")[0]
    if module in family.applied:
        return int(family.applied[module] * model.tokens) if dimensions > 1 else 0
    if dimensions == 4:
        return patches(model.config)
    if dimensions != 2 or any(_is_below(name, family.on_disk(path)) for path in family.lookups):
        return 0
    if module in map(family.on_disk, family.pooled):
        return 1
    if family.experts is not None and model.expert_of(name) is not None:
        # The router sends every token to some of the experts.
        return model.tokens * int(getattr(model.config, family.experts.chosen)) // model.dimension(family.experts.count)
    return model.tokens


def _is_below(name: str, path: str) -> bool:
    """Return True if a tensor is of a module or of one inside it; the path may have `{block}` for any block."""
    before, _, after = path.partition("{block}")
    return name.startswith(before) and (name.startswith(f"{path}.") or (after != "" and f"{after}." in name))
