"""Modules outside the blocks: embeddings, norms, heads, and buffers that no checkpoint stores."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.model.skeleton import parameters_on_meta

ReadTensors = Callable[[list[str]], dict[str, Tensor]]
"""Reads on-disk tensors by name."""


def load_module(
    factory: BlockFactory, model: nn.Module, path: str, tensors: list[str], read: ReadTensors
) -> nn.Module | None:
    """Give a module of a model its parameters and buffers, and return it; None if there is no such module.

    `model` is on the meta device, and changed in place. `tensors` are the on-disk names of the checkpoint.
    """
    owner, _, name = path.rpartition(".")
    module: nn.Module | None = getattr(model.get_submodule(owner), name, None)
    if module is None:
        return None
    inside = [disk for disk in tensors if any(p.startswith(f"{path}.") for p in factory.find_parameters(disk))]
    factory.fill(module, path, read(inside))
    give_buffers(factory, model, lambda place: place == path or place.startswith(f"{path}."))
    return model.get_submodule(path)


def give_buffers(factory: BlockFactory, model: nn.Module, is_wanted: Callable[[str], bool]) -> None:
    """Make the buffers that no checkpoint stores, of modules at the wanted paths. The model is changed in place.

    Modules compute them themselves, off the meta device.
    """
    for path, module in list(model.named_modules()):
        if not is_wanted(path) or not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        real = _make_again(factory, type(module), path)
        if next(module.parameters(), None) is None:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, real)
        else:
            for name, values in real.named_buffers(recurse=False):
                module.register_buffer(name, values.to(factory.device), persistent=False)


def _make_again(factory: BlockFactory, kind: type[nn.Module], path: str) -> nn.Module:
    """Return a module whose buffers are real."""
    build: Any = kind
    if next(iter(inspect.signature(kind).parameters), None) == "config":
        with factory.device:
            made: nn.Module = build(factory.config)
            return made.eval()  # in training DINOv3's positions are drawn at random
    # Only the model knows what it is made of (an embedding that is scaled).
    model_class: Any = type(factory.skeleton)
    with parameters_on_meta():
        module: nn.Module = model_class(factory.config).get_submodule(path)
        return module.eval()
