"""Shapes before data: every output tensor's dtype and shape, checked against the container on the meta device."""

from collections.abc import Set

import torch

from ckpt_prune.architectures.family import ColumnSpace, Family, SpaceName
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.containers.checking import check_shapes
from ckpt_prune.containers.container import Container, Widths

Shape = tuple[torch.dtype, tuple[int, ...]]
Layout = dict[str, dict[str, Shape]]
"""File → tensor → dtype and shape."""

Added = dict[str, tuple[str, tuple[int, ...]]]
"""A tensor that the source has not → one of its tensors, whose file and dtype it shares, and its shape."""


def source_shapes(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Name → dtype and shape of every tensor of a checkpoint."""
    return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}


def pruned_shapes(
    checkpoint: Checkpoint, family: Family, widths: Widths, padded: Set[SpaceName] = frozenset()
) -> dict[str, Shape]:
    """Name → dtype and shape of a checkpoint's tensors at other widths, before any bias is added.

    Args:
        checkpoint: the source.
        family: its description.
        widths: units kept per block and space.
        padded: spaces that stay at their dense width.
    """
    config = parse_config(checkpoint.config)
    shapes = source_shapes(checkpoint)
    for block, kept in enumerate(widths):
        for space, count in kept.items():
            if space in padded:
                continue
            description = family.spaces[space]
            units = family.units(config, space)
            for module in family.producers(space):
                for name in (family.tensor(block, module), family.tensor(block, module, "bias")):
                    if name in shapes:
                        dtype, shape = shapes[name]
                        shapes[name] = (dtype, (shape[0] // units * count, *shape[1:]))
            if isinstance(description, ColumnSpace):
                name = family.tensor(block, description.consumer)
                dtype, shape = shapes[name]
                shapes[name] = (dtype, (shape[0], count * family.unit_columns(config, space)))
    return shapes


def plan_layout(
    checkpoint: Checkpoint, family: Family, widths: Widths, container: Container, added: Added | None = None
) -> Layout:
    """The output's files: the source's shards and names, pruned shapes, added biases beside their weights.

    Args:
        checkpoint: the source.
        family: its description.
        widths: units kept per block and space.
        container: what the output is stored as.
        added: tensors that the output has and the source has not, beside biases.

    Raises:
        UserError: the result would not load under the container (a fault of this tool, caught before any byte).
    """
    shapes = pruned_shapes(checkpoint, family, widths, container.padded)
    files = {name: info.file for name, info in checkpoint.tensors.items()}
    for block in range(len(widths)):
        for module in sorted(container.biases):
            weight, bias = family.tensor(block, module), family.tensor(block, module, "bias")
            if bias not in shapes:
                shapes[bias] = (shapes[weight][0], (shapes[weight][1][0],))
                files[bias] = files[weight]
    for name, (beside, shape) in (added or {}).items():
        shapes[name] = (shapes[beside][0], shape)
        files[name] = files[beside]
    check_shapes({name: shape for name, (_, shape) in shapes.items()}, container.skeleton(), "the output")
    layout: Layout = {file: {} for file in checkpoint.files}
    for name in shapes:
        layout[files[name]][name] = shapes[name]
    return layout
