"""What a model costs: parameters, bytes on disk, FLOPs and its cache of keys and values, from shapes alone."""

from math import prod

from ckpt_prune.architectures.model import Model, Shapes, patches
from ckpt_prune.architectures.skeleton import is_stored_buffer
from ckpt_prune.planning.records import Cost


def cost_of(model: Model, shapes: Shapes | None = None) -> Cost:
    """The cost of a model, or of one that its family and config describe and whose tensors have other shapes.

    Args:
        model: what is counted.
        shapes: on-disk name → dtype and shape; the checkpoint's own by default.
    """
    family, tokens = model.family, model.tokens
    shapes = model.shapes if shapes is None else shapes
    head, embedding = f"{family.head}.weight", f"{family.on_disk(family.embedding or '')}.weight"
    sizes = {name: prod(shape) for name, (_, shape) in shapes.items() if not is_stored_buffer(name)}
    parameters = sum(size for name, size in sizes.items() if not (model.tied and name.startswith(f"{family.head}.")))
    size = sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    flops = 0
    for name, numel in sizes.items():
        flops += 2 * numel * _applications(model, name, len(shapes[name][1]))
    if family.head is not None and head not in shapes:
        flops += 2 * tokens * prod(shapes[embedding][1])
    cache = 0
    for block in range(model.blocks):
        own = family.attention
        queries, keys, values = (shapes[model.tensor(block, each)] for each in (own.query, own.key, own.value))
        mixed = shapes[model.tensor(block, own.output)][1][1]
        fused = own.query == own.value
        # Two products of (T, T): scores over every query head's dimensions, and their product with the values.
        flops += 2 * tokens**2 * (mixed if fused else queries[1][0]) + 2 * tokens**2 * mixed
        kept = queries[1][0] - mixed if fused else keys[1][0] + values[1][0]
        cache += kept * values[0].itemsize
    return Cost(parameters=parameters, bytes=size, flops=flops, tokens=tokens, cache=cache if family.causal else None)


def _applications(model: Model, name: str, dimensions: int) -> int:
    """How often a tensor is multiplied in one forward pass."""
    family, module = model.family, name.rpartition(".")[0]
    if dimensions == 4:
        return patches(model.config)
    looked_up = any(name.startswith(f"{family.on_disk(path)}.") for path in family.lookups)
    if dimensions != 2 or looked_up:
        return 0
    return 1 if module in map(family.on_disk, family.pooled) else model.tokens
