"""The cost of a model, from shapes alone: parameters, bytes on disk, FLOPs, and its cache of keys and values."""

import re
from collections.abc import Mapping
from math import prod
from posixpath import commonpath

import torch

from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.context import image_size, patches
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.model.factors import factor_names
from ckpt_prune.model.image_flops import image_flops
from ckpt_prune.model.matching import tied_by_description
from ckpt_prune.model.model import Model, TensorSpecs
from ckpt_prune.model.skeleton import is_parameter, stock_names


def cost_of(model: Model, shapes: TensorSpecs | None = None) -> Cost:
    """Return the cost of a model, also of one with the same family and config whose tensors have other shapes.

    Args:
        shapes: on-disk name → dtype and shape; the checkpoint's own by default.
    """
    family, tokens = model.family, model.tokens
    shapes = model.shapes if shapes is None else shapes
    head, embedding = f"{family.head}.weight", family.embedding_weight
    sizes = {name: prod(shape) for name, (_, shape) in shapes.items() if is_parameter(name)}
    tied = _tied_names(model)
    parameters = sum(size for name, size in sizes.items() if name not in tied)
    size = sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    if family.stage is not None:
        weights = {name: shape for name, (_, shape) in shapes.items()}
        image = image_size(family, model.config)
        flops = image_flops(model.checkpoint.config, family.architecture, image, weights)
        return Cost(parameters=parameters, bytes=size, flops=flops)
    probe, lookups = family.architectures[family.architecture].probe, [*map(family.on_disk, family.lookups)]
    flops = 0
    for name, numel in sizes.items():
        if name == f"{probe}.in_proj_weight":
            # A query, and keys and values of every token; then two products of it with them.
            flops += 2 * numel // 3 * (1 + 2 * tokens) + 4 * tokens * shapes[name][1][1]
        else:
            flops += 2 * numel * _applications(model, name, len(shapes[name][1]), lookups)
    if family.head is not None and head not in shapes:
        flops += 2 * tokens * prod(shapes[embedding][1])
    if family.is_stack:
        flops += 4 * tokens**2 * sum(_mixed_columns(family.attention.output, shapes))
        return Cost(parameters=parameters, bytes=size, flops=flops, tokens=tokens)
    cache = 0
    for block in range(model.blocks):
        attention = family.attention
        output = model.tensor(block, attention.output)
        cached = attention.latent or attention.key
        needed = (output, model.tensor(block, cached))
        is_here = all(name in shapes or factor_names(name)[0] in shapes for name in needed)
        if not is_here:
            continue  # it mixes tokens in another way, or not at all
        if attention.latent:
            keys, mixed = (
                _whole(shapes, model.tensor(block, cached)),
                _whole(shapes, model.tensor(block, attention.output)),
            )
            flops += 2 * tokens**2 * (model.dimension("query_heads") * model.dimension("logits") + mixed[1][1])
            cache += keys[1][0] * keys[0].itemsize
            continue
        queries, keys = (_whole(shapes, model.tensor(block, each)) for each in (attention.query, attention.key))
        value = model.tensor(block, attention.value)
        has_values = value in shapes or factor_names(value)[0] in shapes  # blocks may take keys for them
        values = _whole(shapes, value) if has_values else keys
        columns = _whole(shapes, model.tensor(block, attention.output))[1][1]
        fused = attention.query == attention.value
        # Two products of (T, T): scores over every query head's dimensions, and their product with the values.
        flops += 2 * tokens**2 * (columns if fused else queries[1][0]) + 2 * tokens**2 * columns
        kept = queries[1][0] - columns if fused else keys[1][0] + values[1][0]
        cache += kept * values[0].itemsize
    return Cost(parameters=parameters, bytes=size, flops=flops, tokens=tokens, cache=cache if family.causal else None)


def _mixed_columns(output: str, shapes: TensorSpecs) -> list[int]:
    """Return how many columns each attention of an encoder-decoder mixes, in both stacks and between them.

    Scores are products over as many. Their last modules have one name: o in T5, out_proj in BART.
    """
    end = f".{output.rpartition('.')[2]}.weight"
    return [shape[1] for name, (_, shape) in shapes.items() if name.endswith(end) and len(shape) == 2]


def count_by_part(model: Model) -> dict[str, int]:
    """Return the parameters of a model's parts, the largest first; `rest` are norms and what stands behind the blocks.

    A tied head is in the embedding. `other layers` of blocks are no attention that is described, and no mlp: linear
    attention, state spaces, convolutions.
    """
    family, tied, parts = model.family, _tied_names(model), dict[str, int]()
    blocks = re.compile(re.escape(family.block).replace(re.escape("{block}"), r"\d+") + "(.+)")
    shared = commonpath([module.replace(".", "/") for module in family.attention.modules]).replace("/", ".")
    others = {*family.linears_of("mlp")}
    mlp = {module.partition(".")[0] for module in others if module not in family.spaceless}
    mlp -= {module.partition(".")[0] for module in family.attention.modules}
    is_apart = shared and not any(_is_below(module, shared) for module in others)
    attention, lookups = [shared] if is_apart else family.attention.modules, [*map(family.on_disk, family.lookups)]
    # A bias, which has one dimension as a norm has, goes where its weight goes.
    matrices = {name.rpartition(".")[0] for name, (_, shape) in model.shapes.items() if len(shape) > 1}
    for name, (_, shape) in model.shapes.items():
        if name in tied or not is_parameter(name):
            continue
        inside = blocks.fullmatch(name)
        if inside is not None and any(_is_below(inside[1], path) for path in attention):
            part = "attention"
        elif inside is not None and (name.rpartition(".")[0] in matrices or len(shape) > 1):
            module = inside[1].rpartition(".")[0]
            part = "mlp" if module in others or inside[1].partition(".")[0] in mlp else "other layers"
        elif inside is not None:
            part = "rest"
        elif family.head is not None and _is_below(name, family.head):
            part = "head"
        elif len(shape) == 4 or any(_is_below(name, path) for path in lookups):
            part = "embedding"
        else:
            part = "rest"
        parts[part] = parts.get(part, 0) + prod(shape)
    return dict(sorted(parts.items(), key=lambda each: (-each[1], each[0])))


def part_words(parts: Mapping[str, int]) -> str:
    """Return how parameters are divided, in words: embedding 63%, mlp 26%, attention 11%."""
    total = sum(parts.values())
    shares = {part: count / total for part, count in parts.items()}
    return ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005)


def _tied_names(model: Model) -> frozenset[str]:
    """Return on-disk names of tensors that share another's parameters.

    A head's bias is tied in some classes (BERT's) and its own in others (DistilBERT's).
    """
    if not model.tied:
        return frozenset()
    if not model.checkpoint.by_class:
        return frozenset(tied_by_description(model.checkpoint, model.family))
    if model.has_remote_code:
        return stored_container(model.checkpoint).names().tied
    return stock_names(model.checkpoint.config, model.family.architecture).tied


def _whole(shapes: TensorSpecs, weight: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a linear's weight, also if it is the product of two."""
    if weight in shapes:
        return shapes[weight]
    down, up = factor_names(weight)
    return shapes[up][0], (shapes[up][1][0], shapes[down][1][1])


def _applications(model: Model, name: str, dimensions: int, lookups: list[str]) -> int:
    """Return how often a tensor is multiplied by in one forward pass; of `lookups` on disk, rows are looked up."""
    family, module = model.family, name.rpartition(".")[0]
    if module in family.multiplied_per_token:
        return int(family.multiplied_per_token[module] * model.tokens) if dimensions > 1 else 0
    if dimensions == 4 and family.modality == "image" and family.stride is None:
        return patches(model.config, image_size(family, model.config))
    if dimensions != 2 or name.endswith("_bias") or any(_is_below(name, path) for path in lookups):
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
