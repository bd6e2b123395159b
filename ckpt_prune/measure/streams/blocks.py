"""Transformer blocks as transformers modules, holding just the tensors they are given."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from ckpt_prune import modeling_pruned
from ckpt_prune.architectures.blocks import block_facts, returns_tuple
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.skeleton import (
    PAIRS,
    Names,
    build_skeleton,
    is_stored_buffer,
    parameters_on_meta,
    shapes_alone,
)
from ckpt_prune.architectures.spaces import known_space
from ckpt_prune.measure.streams.experts import SplitExperts, split_experts


class BlockFactory:
    """Builds single blocks of a model, of any widths the tensors have, without ever holding the model.

    Args:
        model: the dense model.
        device: where the blocks run.
        dtype: floating-point type the blocks compute in.
        skeleton: the model on the meta device, where it is not the stock one of the config. Its config takes the place
            of the model's: a model that is built settles in it which attention runs.
    """

    def __init__(
        self,
        model: Model,
        *,
        device: torch.device,
        dtype: torch.dtype,
        skeleton: nn.Module | None = None,
    ) -> None:
        if skeleton is None:
            self.skeleton = build_skeleton(model.config, model.family.architecture)
        else:
            own: Any = skeleton.config
            self.skeleton, model = skeleton, model.with_config(own)
        self.model, self.device, self.dtype = model, device, dtype
        self.family, self.config = model.family, model.config
        self.names = Names(self.skeleton)
        self._layers: Any = self.skeleton.get_submodule(self.family.layers)
        self._buffers: dict[str, Tensor] = {}
        self._facts = block_facts(self.family, model.dimension)
        self._experts = self.family.expert_modules
        of_block = re.escape(self.family.block).replace(re.escape("{block}"), r"(\d+)")
        self._of_block = re.compile(rf"{of_block}(.+)\.(weight|bias)")

    @property
    def returns_tuple(self) -> bool:
        """Whether a block returns its hidden states as the first of several things."""
        return returns_tuple(self.family, type(self._layers[0]))

    def block(self, index: int, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> nn.Module:
        """Block `index` with the given on-disk tensors as its parameters.

        Widths are read off the tensors, biases are there where a bias tensor is.

        Args:
            index: of the block.
            tensors: by on-disk name.
            dtype: of the parameters; the factory's by default.
        """
        # Blocks of what was pruned already may differ in width.
        model = self.model.with_config(modeling_pruned.layer_config(self.config, index))
        layer_config = model.narrowed(model.widths_of(index, tensors)).config
        with shapes_alone():
            module = modeling_pruned.make_block(type(self._layers[index]), layer_config, self._facts, index)
        _orient(module)
        self._split(module, index, tensors)
        self.fill(module, f"{self.family.layers}.{index}", tensors, dtype=dtype)
        self._give_buffers(module, layer_config, index)
        return module.eval()

    def _split(self, block: nn.Module, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Give experts linear modules of their own."""
        held = {own[0] for module, own in self._experts.items() if self.family.tensor(index, module) in tensors}
        if held and self.family.experts is not None:
            split_experts(block, self.family.experts, self.family.model_type, len(held))

    def experts(self, block: nn.Module) -> SplitExperts | None:
        """The experts of a block that it has built, or None where the block has none."""
        return next((module for module in block.modules() if isinstance(module, SplitExperts)), None)

    def expert_of(self, what: str) -> int | None:
        """The expert of a space or linear module, or None where it is of the whole block."""
        space = self.family.columns.get(what)
        own = self._experts.get(what if space is None else space.consumer)
        return None if own is None else own[0]

    def of_any_expert(self, what: str) -> str:
        """The same name for what is the same in every expert: a space, or a linear module; others keep theirs."""
        if what in self.family.spaces:
            return known_space(what)
        return self._experts[what][1] if what in self._experts else what

    def _give_buffers(self, block: nn.Module, config: PreTrainedConfig, index: int) -> None:
        """Make the buffers of a block that no checkpoint stores; every block has the same."""
        wanted = [name for name, buffer in block.named_buffers() if buffer.is_meta]
        if wanted and not self._buffers:
            with parameters_on_meta():
                made = modeling_pruned.make_block(type(self._layers[index]), config, self._facts, index)
            self._buffers = {name: buffer.to(self.device) for name, buffer in made.named_buffers()}
        for path in wanted:
            owner, _, name = path.rpartition(".")
            block.get_submodule(owner).register_buffer(name, self._buffers[path], persistent=False)

    def module_path(self, index: int, module: str) -> str:
        """Path inside a block of a linear module that the family names as it stands on disk."""
        (path, *_) = self.parts(index, self.family.tensor(index, module))
        return path.removesuffix(".weight")

    def outputs(self, block: nn.Module, index: int, module: str) -> int:
        """Outputs of a linear module of a block that it has built."""
        weight: Any = block.get_submodule(self.module_path(index, module)).weight
        return int(weight.shape[0])

    def parts(self, index: int, disk: str) -> list[str]:
        """Paths inside block `index` of the parameters that a tensor on disk holds: equal parts of its rows."""
        return [name.removeprefix(f"{self.family.layers}.{index}.") for name in self.parameters(disk)]

    def fill(
        self, module: nn.Module, path: str, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
    ) -> None:
        """Give a module on the meta device its parameters, cast and moved.

        Args:
            module: at `path` of the model.
            path: of the module.
            tensors: by on-disk name; those outside the module are passed over.
            dtype: of the parameters; the factory's by default.

        Raises:
            ValueError: a parameter is left without a tensor.
        """
        for disk, tensor in tensors.items():
            held = () if is_stored_buffer(disk) else self.parameters(disk)
            parts = tensor.chunk(len(held)) if len(held) > 1 else [tensor] * len(held)
            for parameter, part in zip(held, parts, strict=True):
                if parameter.startswith(f"{path}."):
                    local, _, attribute = parameter.removeprefix(f"{path}.").rpartition(".")
                    owner = module.get_submodule(local)
                    if attribute in owner._buffers:
                        owner.register_buffer(attribute, part.to(self.device))
                        continue
                    value = nn.Parameter(part.to(self.device, dtype or self.dtype), requires_grad=False)
                    owner.register_parameter(attribute, value)
        for name, parameter_ in module.named_parameters():
            if parameter_.is_meta:
                raise ValueError(f"no tensor for {name}")

    def parameters(self, disk: str) -> tuple[str, ...]:
        """Names in the model of what a tensor on disk holds, also of a bias or pairs that the dense model has not.

        Those of experts are of modules of their own (`calibration.experts`).
        """
        place = self._of_block.fullmatch(disk) if self._experts else None
        if place is not None and place[2] in self._experts and self.family.experts is not None:
            expert, role = self._experts[place[2]]
            return (f"{self.family.layers}.{place[1]}.{self.family.experts.module}.{expert}.{role}.{place[3]}",)
        held = self.names.parameters(disk)
        if not held and disk.endswith(f".{PAIRS}"):
            query = self.family.attention.query.rpartition(".")[2]
            (weight,) = self.names.parameters(f"{disk.removesuffix(PAIRS)}{query}.weight")
            return (f"{weight.removesuffix('.weight').rpartition('.')[0]}.{PAIRS}",)
        if not held and disk.endswith(".bias"):
            weights = self.names.parameters(f"{disk.removesuffix('.bias')}.weight")
            return tuple(f"{name.removesuffix('.weight')}.bias" for name in weights)
        return held


def _orient(block: nn.Module) -> None:
    """Put a plain linear, whose weight is (outputs, inputs), where a block on the meta device has its transpose."""
    for path, module in list(block.named_modules()):
        if isinstance(module, Conv1D):
            owner, _, name = path.rpartition(".")
            setattr(block.get_submodule(owner), name, nn.Linear(module.nx, module.nf, device="meta"))
