"""Shapes before data: every output tensor's dtype and shape, checked against the container on the meta device."""

from collections.abc import Mapping

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.shard import stack_shapes
from ckpt_prune.model.composites import composite_names, merge_part_config
from ckpt_prune.model.containers.checking import check_shapes
from ckpt_prune.model.containers.container import Container, Ranks, Widths
from ckpt_prune.model.factors import factor_names
from ckpt_prune.model.model import Model, TensorSpec

Layout = dict[str, dict[str, TensorSpec]]
"""File → tensor → dtype and shape."""
Added = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor that the source lacks, or has in another shape → the tensor whose file and dtype it shares, and its shape."""


def plan_layout(
    model: Model, widths: Widths, container: Container, added: Added | None = None, ranks: Ranks = ()
) -> Layout:
    """The output's files: the source's shards and names, pruned shapes, added biases beside their weights.

    Args:
        model: the source.
        widths: units kept per block and space.
        container: what the output is stored as.
        added: tensors that the output has and the source has not, beside biases, or that have another shape there.
        ranks: of linear modules whose weight two thin ones stand in for.

    Raises:
        UserError: the result would not load under the container (a fault of this tool, caught before any byte).
    """
    narrow = [{space: count for space, count in own.items() if space not in container.padded} for own in widths]
    shapes = model.shapes_at(narrow)
    files = {name: info.file for name, info in model.checkpoint.tensors.items()}
    for name, (beside, shape) in (added or {}).items():
        shapes[name] = (shapes[beside][0], shape)
        files[name] = files[beside]
    for block in range(len(widths)):
        for module in sorted(container.biases):
            weight, bias = model.tensor(block, module), model.tensor(block, module, "bias")
            if bias not in shapes and weight in shapes:
                shapes[bias] = (shapes[weight][0], (shapes[weight][1][0],))
                files[bias] = files[weight]
    for block in range(len(widths)):
        if model.pairs_name(block) in shapes:
            files[model.pairs_name(block)] = files[model.tensor(block, model.family.attention.query)]
    for block, own in enumerate(ranks):
        for module, rank in own.items():
            weight = model.tensor(block, module)
            dtype, (rows, columns) = shapes.pop(weight)
            for name, shape in zip(factor_names(weight), ((rank, columns), (rows, rank)), strict=True):
                shapes[name], files[name] = (dtype, shape), files[weight]
    turned = model.checkpoint.transposed
    plain = stack_shapes(shapes, model.checkpoint.stacks)
    stored = {name: shape[::-1] if name in turned else shape for name, (_, shape) in plain.items()}
    check_shapes(stored, container.names(), "the output")
    layout: Layout = {file: {} for file in model.checkpoint.files}
    for name in shapes:
        layout[files[name]][name] = shapes[name]
    _check_whole(model.checkpoint, container, stored)
    return layout


def _check_whole(checkpoint: Checkpoint, container: Container, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Where the source is a part of a composite, the class of that must take the output too."""
    within = checkpoint.within
    if within is None:
        return
    rest = {name: info.stored_shape for name, info in within.rest.items()}
    inside = {within.on_disk(name): shape for name, shape in stored.items()}
    check_shapes(rest | inside, composite_names(merge_part_config(checkpoint, container.config)), "the output")


OUTER = "/"
"""Before the names of tensors of a composite that are not in its part: names in a part never begin so."""


def with_rest(checkpoint: Checkpoint, layout: Layout) -> tuple[Layout, dict[str, str]]:
    """The files of a whole output, and the names on disk of its tensors where these differ.

    Args:
        checkpoint: the source; the layout is that of its own tensors.
        layout: of the output.
    """
    within = checkpoint.within
    if within is None:
        return layout, dict(checkpoint.aliases)
    found: Layout = {file: dict(tensors) for file, tensors in layout.items()}
    for name, info in within.rest.items():
        found[info.file][OUTER + name] = (info.dtype, info.shape)
    own = {name: within.on_disk(name) for tensors in layout.values() for name in tensors}
    return found, own | {OUTER + name: name for name in within.rest}


def layout_of(model: Model) -> Layout:
    """The files of a checkpoint as they are."""
    layout: Layout = {file: {} for file in model.checkpoint.files}
    for name, info in model.checkpoint.tensors.items():
        layout[info.file][name] = (info.dtype, info.shape)
    return layout
