"""The files of an output: every tensor's dtype and shape, checked against the container on the meta device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.shard import stack_shapes
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.kept_bytes import KeptBytes
from ckpt_prune.model.composites import composite_names, merge_part_config
from ckpt_prune.model.containers.checking import check_shapes
from ckpt_prune.model.containers.container import Container, Ranks, Widths
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.model.factors import factor_names
from ckpt_prune.model.model import Model, TensorSpec
from ckpt_prune.model.skeleton import stock_names

Layout = dict[str, dict[str, TensorSpec]]
"""File → tensor → dtype and shape."""
Added = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor that the source lacks, or has in another shape → the tensor whose file and dtype it shares, and its shape."""


@dataclass(frozen=True)
class Output:
    """The plan of an output, which is known before the first tensor is made.

    Attributes:
        container: what it is stored as.
        layout: its files, tensors, dtypes and shapes.
        aside: files beside the checkpoint, such as rotations, with their tensors.
        ranks: of linear modules that become two; empty if none does.
        copied: files of the source that the output has, too, besides those that always travel along.
        packed: weights that tensors of few bits stand in for in the layout, as they would be otherwise.
        kept: weights of few bits that it stores as its source does; None if all are plain.
    """

    container: Container
    layout: Layout
    cost: Cost
    aside: Layout = field(default_factory=dict)
    ranks: Ranks = ()
    copied: tuple[str, ...] = ()
    packed: dict[str, TensorSpec] = field(default_factory=dict)
    kept: KeptBytes | None = None


def plan_layout(
    model: Model, widths: Widths, container: Container, added: Added | None = None, ranks: Ranks = ()
) -> Layout:
    """Return the output's files: the source's shards and names, pruned shapes, added biases beside their weights.

    UserError if the container could not load them: a fault of this tool, caught before any byte is written.

    Args:
        widths: units kept per block and space.
        container: what the output is stored as.
        added: tensors besides biases that the source lacks, or has in another shape.
        ranks: of linear modules that become two thin ones.
    """
    narrow = [{space: count for space, count in counts.items() if space not in container.padded} for counts in widths]
    shapes = model.shapes_at(narrow)
    files = {name: info.file for name, info in model.checkpoint.tensors.items()}
    for name, (neighbour, shape) in (added or {}).items():
        shapes[name] = (shapes[neighbour][0], shape)
        files[name] = files[neighbour]
    for block in range(len(widths)):
        for module in sorted(container.biases):
            weight, bias = model.tensor(block, module), model.tensor(block, module, "bias")
            if bias not in shapes and weight in shapes:
                shapes[bias] = (shapes[weight][0], (shapes[weight][1][0],))
                files[bias] = files[weight]
    for block in range(len(widths)):
        if model.pairs_name(block) in shapes:
            files[model.pairs_name(block)] = files[model.tensor(block, model.family.attention.query)]
    for block, rank_of in enumerate(ranks):
        for module, rank in rank_of.items():
            weight = model.tensor(block, module)
            dtype, (rows, columns) = shapes.pop(weight)
            for name, shape in zip(factor_names(weight), ((rank, columns), (rows, rank)), strict=True):
                shapes[name], files[name] = (dtype, shape), files[weight]
    turned = model.checkpoint.transposed
    plain = {name: (dtype, shape[::-1] if name in turned else shape) for name, (dtype, shape) in shapes.items()}
    stored = {name: shape for name, (_, shape) in stack_shapes(plain, model.checkpoint.stacks).items()}
    within = model.checkpoint.within
    other = within.other_prefixes if within is not None and within.goes_on else ()
    if within is not None and not other:
        check_beside(model, container.config)
    if model.checkpoint.by_class:
        check_shapes(stored, container.names(), "the output", other_prefixes=other)
    layout: Layout = {file: {} for file in model.checkpoint.files}
    for name in shapes:
        layout[files[name]][name] = shapes[name]
    if within is not None:  # a part of a composite, whose class must take the output too
        outside = {name: info.stored_shape for name, info in within.rest.items()}
        inside = {within.on_disk(name): shape for name, shape in stored.items()}
        names = composite_names(merge_part_config(model.checkpoint, container.config))
        check_shapes(outside | inside, names, "the output", other_prefixes=other)
    return layout


def find_shared_key(model: Model) -> str | None:
    """Return a config key that states a width of the stack that a model is, and of the others beside it."""
    within, family = model.checkpoint.within, model.family
    shared = [space for space in family.consumers.values() if family.shares_width(space)]
    return family.width_key(shared[0]) if within is not None and within.other_prefixes and shared else None


def check_beside(model: Model, config: Mapping[str, Any]) -> None:
    """Refuse an output whose other stack of blocks is not as wide as a config key says that both are."""
    within, family, key = model.checkpoint.within, model.family, find_shared_key(model)
    if within is None or key is None:
        return
    names = stock_names(dict(config), family.architecture)
    for name, info in model.checkpoint.tensors.items():
        if name.startswith(within.other_prefixes) and names.shape(name) not in (None, info.stored_shape):
            others = name.partition(".block")[0]
            raise UserError(
                f"{key} of {family.model_type} states the width of all stacks of blocks, and the {others} has another "
                f"than the {within.part} would have: prune without --part, by --ratio, takes all to one width: "
                "plans and sizes are of one stack"
            )


OUTER = "/"
"""Before the names of tensors of a composite that are not in its part: names in a part never begin so."""


def with_rest(checkpoint: Checkpoint, layout: Layout) -> tuple[Layout, dict[str, str]]:
    """Return the files of a whole output, and on-disk names where they differ, for the layout of its own tensors."""
    within = checkpoint.within
    if within is None:
        return layout, dict(checkpoint.aliases)
    with_others: Layout = {file: dict(tensors) for file, tensors in layout.items()}
    for name, info in within.rest.items():
        with_others[info.file][OUTER + name] = (info.dtype, info.shape)
    parts = {part for stack in checkpoint.stacks.values() for part in stack.parts}  # in a file they have no names
    names = (name for tensors in layout.values() for name in tensors if name not in parts)
    disk_names = {name: within.on_disk(name) for name in names}
    return with_others, disk_names | {OUTER + name: name for name in within.rest}


def count_bytes(layout: Layout) -> int:
    specs = [spec for tensors in layout.values() for spec in tensors.values()]
    return sum(prod(shape) * dtype.itemsize for dtype, shape in specs)


def layout_of(model: Model) -> Layout:
    layout: Layout = {file: {} for file in model.checkpoint.files}
    for name, info in model.checkpoint.tensors.items():
        layout[info.file][name] = (info.dtype, info.shape)
    return layout
