"""Checks that a checkpoint's tensors are those that its config asks for: names, shapes and dtypes."""

from collections.abc import Mapping
from weakref import WeakSet

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import (
    Names,
    is_parameter,
    is_stored_buffer,
    missing_pooler,
    stock_names,
)

_CHECKED: "WeakSet[Model]" = WeakSet()
"""Models that passed: commands check before they read data, and jobs check any model that they are given."""


def check_source(model: Model) -> None:
    """Check every tensor's name, shape and dtype against the config, on the meta device."""
    if model in _CHECKED:
        return
    if not model.checkpoint.by_class:
        return  # `Model.of` has looked
    config = model.checkpoint.config
    is_remote = model.has_remote_code
    names = stored_container(model.checkpoint).names() if is_remote else stock_names(config, model.family.architecture)
    check_stored(model.checkpoint, names)
    _CHECKED.add(model)


def check_stock(model: Model, what: str) -> None:
    """Refuse an output of this tool that carries code of its own.

    Args:
        what: cannot be done with it, and why, for the message.
    """
    if model.has_remote_code:
        raise UserError(
            f"{model.checkpoint.path} was pruned into a shape that no stock class has (remote code): {what}; start "
            "from the dense model"
        )


def check_stored(checkpoint: Checkpoint, names: Names) -> None:
    """Check every tensor's name, shape and dtype against the names of a model."""
    tensors = checkpoint.stored
    other = () if checkpoint.within is None else checkpoint.within.other_prefixes
    shapes = {name: info.stored_shape for name, info in tensors.items()}
    check_shapes(shapes, names, f"{checkpoint.path}", other_prefixes=other)
    buffers = {name for name, _ in names.model.named_buffers()}  # of any type: DeepSeek V4 looks experts of tokens up
    for name, info in tensors.items():
        if info.dtype in (torch.bfloat16, torch.float16, torch.float32) or not is_parameter(name):
            continue
        if buffers.isdisjoint(names.parameters(name)):
            raise UserError(f"{name} is {info.dtype}: only bfloat16, float16 and float32 checkpoints can be pruned")


def check_shapes(
    actual: Mapping[str, tuple[int, ...]], names: Names, where: str, *, other_prefixes: tuple[str, ...] = ()
) -> None:
    """Compare names and shapes with those that a config asks for.

    Args:
        actual: name → shape in its file.
        names: of the config's model. Tensors that it ignores may be there.
        where: begins every message.
        other_prefixes: first parts of names of tensors that may have other shapes (`PartOf.other_prefixes`).
    """
    stored = sorted(name for name in actual if not is_stored_buffer(name))
    expected = {name: names.shape(name) for name in stored}
    missing = names.missing(stored)
    may_lack = names.tied | missing_pooler(names.model, missing)
    missing = [name for name in missing if name not in may_lack and not is_stored_buffer(name)]
    unknown = [name for name, shape in expected.items() if shape is None and not names.ignores(name)]
    if missing:
        raise UserError(f"{where} lacks tensor {missing[0]} ({len(missing)} missing), which its config.json asks for")
    if unknown:
        raise UserError(f"{where} has tensor {unknown[0]} ({len(unknown)} such), which config.json has no place for")
    for name, shape in expected.items():
        fits = shape is None or tuple(actual[name]) == shape or names.is_turned(name, tuple(actual[name]))
        fits = fits or names.fit_together(name, actual)
        if not fits and not name.startswith(other_prefixes):
            raise UserError(f"{where}: {name} has shape {list(actual[name])}, config.json says {list(shape or ())}")
