"""Shapes before data: every output tensor's dtype and shape, checked against the container on the meta device."""

from collections.abc import Mapping, Set

import torch
from torch import nn

from ckpt_prune.architectures.family import ColumnSpace, Family, SpaceName
from ckpt_prune.architectures.remote import remote_class
from ckpt_prune.architectures.skeleton import Names, build_skeleton, is_stored_buffer, parse_config, tied_names
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.errors import UserError
from ckpt_prune.transform.containers import Container, Widths

Shape = tuple[torch.dtype, tuple[int, ...]]
Layout = dict[str, dict[str, Shape]]
"""File → tensor → dtype and shape."""

Added = dict[str, tuple[str, tuple[int, ...]]]
"""A tensor that the source has not → one of its tensors, whose file and dtype it shares, and its shape."""


def source_shapes(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Name → dtype and shape of every tensor of a checkpoint."""
    return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}


def check_source(checkpoint: Checkpoint, family: Family) -> None:
    """Check every tensor's name and shape against the config, on the meta device.

    Raises:
        UserError: a tensor is missing, unknown, of another shape than the config says, or not floating point.
    """
    if remote_class(checkpoint.config, checkpoint.path) is not None:
        raise UserError(
            f"{checkpoint.path} was pruned into a shape that no stock class has (remote code): it cannot be pruned or "
            "measured again; start from the dense model"
        )
    skeleton = build_skeleton(parse_config(checkpoint.config), family.architecture)
    check_stored(checkpoint, skeleton)


def check_stored(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Check every tensor's name, shape and dtype against a model.

    Args:
        checkpoint: what is stored.
        model: what it is to be, on the meta device.

    Raises:
        UserError: a tensor is missing, unknown, of another shape, or not floating point.
    """
    check_shapes({name: info.shape for name, info in checkpoint.tensors.items()}, model, f"{checkpoint.path}")
    for name, info in checkpoint.tensors.items():
        if is_stored_buffer(name):
            continue
        if info.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(f"{name} is {info.dtype}: only bfloat16, float16 and float32 checkpoints can be pruned")


def check_shapes(actual: Mapping[str, tuple[int, ...]], model: nn.Module, where: str) -> None:
    """Compare names and shapes with what a config asks for.

    Args:
        actual: name → shape on disk.
        model: of the config, on the meta device.
        where: begins every message.

    Raises:
        UserError: a tensor is missing, has no place, or has another shape.
    """
    known = Names(model)
    names = sorted(name for name in actual if not is_stored_buffer(name))
    expected = {name: known.shape(name) for name in names}
    missing = [name for name in known.missing(names) if name not in tied_names(model)]
    unknown = [name for name, shape in expected.items() if shape is None]
    if missing:
        raise UserError(f"{where} lacks tensor {missing[0]} ({len(missing)} missing), which its config.json asks for")
    if unknown:
        raise UserError(f"{where} has tensor {unknown[0]} ({len(unknown)} such), which config.json has no place for")
    for name, shape in expected.items():
        if tuple(actual[name]) != shape:
            raise UserError(f"{where}: {name} has shape {list(actual[name])}, config.json says {list(shape or ())}")


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
