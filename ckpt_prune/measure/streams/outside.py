"""Everything of a model outside its blocks: embeddings, norms, heads, and buffers that no checkpoint stores."""

import copy
import inspect
from collections.abc import Callable, Iterable, Set
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.recorders import Recorders
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.skeleton import (
    Names,
    build_skeleton,
    is_stored_buffer,
    missing_pooler,
    parameters_on_meta,
    parse_config,
)

ReadTensors = Callable[[list[str]], dict[str, Tensor]]
"""Reads on-disk tensors by name."""


class Surroundings(Protocol):
    """A model on the meta device, and the tensors on disk that its parameters are made of. A `BlockFactory` is one.

    `layers` is the path of the blocks in it.
    """

    @property
    def skeleton(self) -> nn.Module: ...
    @property
    def config(self) -> Any: ...
    @property
    def layers(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def names(self) -> Names: ...
    def find_parameters(self, disk: str) -> tuple[str, ...]: ...
    def split(self, disk: str, tensor: Tensor) -> tuple[Tensor, ...]: ...


class Whole:
    """The composite around the blocks of one of its parts (`Surroundings`).

    Args:
        factory: of the part's blocks.
    """

    def __init__(self, factory: BlockFactory) -> None:
        within = factory.model.checkpoint.within
        assert within is not None
        self._within, self.device, self.dtype = within, factory.device, factory.dtype
        self.name = str(within.whole.config["model_type"])
        composite = load_composite(within.whole.config)
        self.config = parse_config(within.whole.config)
        self.skeleton = build_skeleton(self.config, composite.architecture)
        self.layers = composite.part(within.part).outer_name(factory.layers)
        self._part_names = {stored: name for name, stored in within.names.items()}

    @cached_property
    def names(self) -> Names:
        """Names and shapes of the composite on disk."""
        return Names(self.skeleton)

    def find_parameters(self, disk: str) -> tuple[str, ...]:
        """Find the names in the composite of what a tensor on disk holds."""
        return self.names.parameters(disk)

    def split(self, disk: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor on disk into the rows of the parameters that it holds."""
        return self.names.split(disk, tensor, len(self.find_parameters(disk)))

    def load(self, read: ReadTensors) -> nn.Module:
        """Load everything outside the part's blocks but the head. `read` reads tensors of the part, by its names."""

        def read_any(names: list[str]) -> dict[str, Tensor]:
            inside = {self._part_names[name]: name for name in names if name in self._part_names}
            of_part = {inside[name]: tensor for name, tensor in read([*inside]).items()} if inside else {}
            others = [name for name in names if name not in self._part_names]
            return of_part | (self._within.whole.read(others) if others else {})

        model: Any = self.skeleton
        heads = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
        ties = self.names.ties
        unread = {f"{name}.weight" for name in heads} - ties.keys() - set(ties.values())
        return load_outside(self, self._within.whole.tensors, read_any, unread)


def load_outside(factory: Surroundings, tensors: Iterable[str], read: ReadTensors, unread: Set[str]) -> nn.Module:
    """Return the model with everything outside its blocks loaded. The blocks have no memory, and must not run.

    Args:
        factory: of the model's blocks; its skeleton is copied, not changed.
        tensors: on-disk names of the checkpoint.
        read: reads on-disk tensors by name; asked for those outside the blocks only.
        unread: parameters of the model whose values are of no use: they take the room of one number.

    Raises:
        ValueError: a parameter outside the blocks has no tensor.
    """
    layers: Any = factory.skeleton.get_submodule(factory.layers)
    # The blocks' own modules are shared with the skeleton, not copied.
    shells = {id(layer): copy.copy(layer) for layer in layers}
    model: Any = copy.deepcopy(factory.skeleton, dict(shells)).to("meta")
    if isinstance(factory, BlockFactory):
        factory.set_counts_beside(model)
    parameters = {name: factory.find_parameters(name) for name in tensors if not is_stored_buffer(name)}
    parameters = {name: own for name, own in parameters.items() if own and is_outside(factory, own[0])}
    for name, own in parameters.items():  # one by one: each takes its room twice while it is cast
        if unread >= set(own):
            zero = torch.zeros((), device=factory.device, dtype=factory.dtype)
            parts = tuple(zero.expand(model.get_parameter(each).shape) for each in own)
        elif factory.names.is_part(name) and (rows := factory.names.parts(own[0])):  # Molmo 2's embedding is in two
            if name != next(iter(rows)):
                continue
            parts = (torch.cat([read([each])[each] for each in rows]),)
        else:
            parts = factory.split(name, read([name])[name])
        for parameter, part in zip(own, parts, strict=True):
            place, _, attribute = parameter.rpartition(".")
            value = part.to(factory.device, factory.dtype if part.is_floating_point() else part.dtype)
            owner = model.get_submodule(place)
            if attribute in owner._buffers:  # a bias of all logits that is not trained
                owner._buffers[attribute] = value
            else:
                owner.register_parameter(attribute, nn.Parameter(value, requires_grad=False))
    # As stock loading ties them: a head that is stored under either name, or under both and differs, is respected.
    named = model.named_parameters(remove_duplicate=False)
    missing = {name for name, parameter in named if parameter.is_meta and is_outside(factory, name)}
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    if missing_pooler(model, missing):
        model.pooler = None
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and is_outside(factory, name) and factory.names.is_computed(name):
            _compute(factory, model, name.rpartition(".")[0])
    for name, parameter in model.named_parameters():
        if parameter.is_meta and is_outside(factory, name):
            raise ValueError(f"no tensor for {name}")
    _give_buffers(factory, model)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def _compute(factory: Surroundings, model: Any, path: str) -> None:
    """Let a class give a module the parameters that no file has to hold. The model is changed in place."""
    module = model.get_submodule(path).to_empty(device=factory.device, recurse=False).requires_grad_(False)
    with torch.random.fork_rng():
        model._init_weights(module)
    module.to(factory.dtype)


def make_recorders(factory: Surroundings, model: nn.Module, **options: Any) -> Recorders:
    """Put recorders in place of the blocks of a model that `load_outside` returned; `options` are of `Recorders`."""
    layers: Any = model.get_submodule(factory.layers)
    outside = [module for path, module in model.named_modules() if path and is_outside(factory, path)]
    return Recorders(layers, outside, factory.name, **options)


def is_outside(factory: Surroundings, path: str) -> bool:
    """Return whether a module or parameter of the model is outside its blocks."""
    layers = factory.layers
    return path != layers and not path.startswith(f"{layers}.")


def _give_buffers(factory: Surroundings, model: nn.Module) -> None:
    """Make the buffers that no checkpoint stores, of modules outside the blocks. The model is changed in place.

    Modules compute them themselves, off the meta device.
    """
    for path, module in list(model.named_modules()):
        if not is_outside(factory, path) or not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        real = _make_again(factory, module, path)
        if next(module.parameters(), None) is None:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, real)
        else:
            for name, values in real.named_buffers(recurse=False):
                module.register_buffer(name, values.to(factory.device), persistent=False)


def _make_again(factory: Surroundings, module: nn.Module, path: str) -> nn.Module:
    """Return a module whose buffers are real."""
    build: Any = type(module)
    first, *others = [*inspect.signature(build).parameters.values(), None]
    if first is not None and first.name == "config" and not any(each and each.default is each.empty for each in others):
        with factory.device, parameters_on_meta():
            fresh: nn.Module = build(getattr(module, "config", factory.config))
            return fresh.eval()  # in training DINOv3's positions are drawn at random
    # Only the model knows what it is made of (an embedding that is scaled).
    model_class: Any = type(factory.skeleton)
    with parameters_on_meta():
        fresh = model_class(factory.config).get_submodule(path)
        return fresh.eval()
