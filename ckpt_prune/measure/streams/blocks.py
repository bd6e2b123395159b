"""Transformer blocks as modules of transformers, built from just the tensors they are given."""

import copy
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckpt_prune.measure.streams.experts import SplitExperts, split_experts
from ckpt_prune.model.blocks import block_facts
from ckpt_prune.model.composites import composite_names, stacks_beside
from ckpt_prune.model.family import KINDS, Family
from ckpt_prune.model.model import BlockWidths, Model
from ckpt_prune.model.skeleton import (
    PAIRS,
    Names,
    build_skeleton,
    is_stored_buffer,
    on_meta_device,
    parameters_on_meta,
)
from ckpt_prune.model.spaces import Dimension, SpaceName, product, recipe_space

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class BlockFactory:
    """Builds single blocks of a model, of any widths the tensors have, without ever holding the model.

    Args:
        device: where the blocks run.
        dtype: floating-point type the blocks compute in.
        skeleton: the model on the meta device, if it is not the stock one of the config. Its config takes the place
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
        self.skeleton = build_skeleton(model.config, model.family.architecture) if skeleton is None else skeleton
        config: Any = self.skeleton.config  # some classes copy theirs, and say in it how attention and masks are made
        model = model.with_config(config)
        self.model, self.device, self.dtype = model, device, dtype
        self.family, self.config = model.family, model.config
        self.names = Names(self.skeleton)
        self._layers: Any = self.skeleton.get_submodule(self.family.layers)
        self._buffers: dict[tuple[int, tuple[int, ...]], dict[str, Tensor]] = {}
        self._facts = block_facts(self.family, model.dimension)
        self._experts = self.family.expert_modules
        of_block = re.escape(self.family.block).replace(re.escape("{block}"), r"(\d+)")
        self._of_block = re.compile(rf"{of_block}(.+)\.(weight|bias|shift)")

    @property
    def layers(self) -> str:
        """Path of the blocks in the model."""
        return self.family.layers

    @property
    def name(self) -> str:
        """The model's type, for messages."""
        return self.family.model_type

    def build_block(self, index: int, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> nn.Module:
        """Build block `index` with the given on-disk tensors as its parameters, in `dtype` or the factory's.

        Widths are those of the tensors. A module has a bias if there is a tensor for it.
        """
        from ckpt_prune import modeling_pruned

        # Blocks of a model that was pruned already may differ in width.
        uneven = getattr(self.config, "is_heterogeneous", True)  # transformers counts one of two stacks alone
        config = modeling_pruned.layer_config(self.config, index) if uneven else copy.copy(self.config)
        model = self.model.with_config(config)
        widths = model.widths_of(index, tensors)
        widths = {space: units for space, units in widths.items() if space not in self.family.pooling}
        layer_config = model.with_widths(widths).config
        module: nn.Module
        with on_meta_device():
            # Some attributes of blocks are in no config (T5), and some blocks are made of a config inside the config.
            if (
                self.family.is_stack
                or self.family.passes_on
                or any("." in key for key in self.family.dimensions["hidden"])
            ):
                module = copy.deepcopy(self._layers[index])
                set_counts(module, self.family, self.model.dimension, widths)
            else:
                module = modeling_pruned.make_block(self._layers[index], layer_config, self._facts, index)
        _replace_transposed(module)
        if self.family.experts is not None:
            experts = {own[0] for name, own in self._experts.items() if self.family.tensor(index, name) in tensors}
            if experts:
                split_experts(module, self.family.experts, self.family.model_type, len(experts))
        self.fill(module, f"{self.family.layers}.{index}", tensors, dtype=dtype)
        as_wide = tuple(widths[name] for name, space in self.family.spaces.items() if space.uniform and name in widths)
        self._give_buffers(module, layer_config, index, as_wide)
        return module.eval()

    def set_counts_beside(self, model: nn.Module) -> None:
        """Set the numbers of other stacks' blocks in a model, in place, that count their heads: they may have fewer."""
        tensors = self.model.checkpoint.tensors
        for family in stacks_beside(self.model.checkpoint):
            dimension = partial(family.dimension, self.config)
            for block in range(dimension("layers")):
                widths = {
                    name: tensors[family.tensor(block, space.consumer)].shape[1] // space.columns.per_unit(dimension)
                    for name, space in family.consumers.items()
                    if space.attributes
                }
                set_counts(model.get_submodule(f"{family.layers}.{block}"), family, dimension, widths)

    def find_experts(self, block: nn.Module) -> SplitExperts | None:
        """Return the experts of a block that was built here, or None if it has none."""
        return next((module for module in block.modules() if isinstance(module, SplitExperts)), None)

    def find_expert(self, key: str) -> int | None:
        """Return the number of the expert that a space or linear module belongs to, or None."""
        space = self.family.columns.get(key)
        expert = self._experts.get(key if space is None else space.consumer)
        return None if expert is None else expert[0]

    def name_without_expert(self, key: str) -> str:
        """Return the name that a space or linear module has in common with those of the other experts."""
        if key in self.family.spaces:
            return recipe_space(key)
        return self._experts[key][1] if key in self._experts else key

    def _give_buffers(self, block: nn.Module, config: "PreTrainedConfig", index: int, as_wide: tuple[int, ...]) -> None:
        """Make the buffers of a block that no checkpoint stores, also those that the model gives its blocks.

        Args:
            as_wide: widths that some of these have (`Space.uniform`).
        """
        buffers = dict(block.named_buffers())
        given = [name for name, _ in self._layers[index].named_buffers() if name not in buffers]
        lacking = [name for name, buffer in buffers.items() if buffer.is_meta] + given
        if lacking and (index, as_wide) not in self._buffers:
            within, whole = bool(given) or self.family.stage is not None, config if as_wide else self.config
            real = self._real(config, whole, index, within)
            self._buffers[index, as_wide] = {name: buffer.to(self.device) for name, buffer in real.named_buffers()}
        for path in lacking:
            owner, _, name = path.rpartition(".")
            block.get_submodule(owner).register_buffer(name, self._buffers[index, as_wide][path], persistent=False)

    def _real(self, config: "PreTrainedConfig", whole: "PreTrainedConfig", index: int, within: bool) -> nn.Module:
        """Return a block with real buffers and no parameters, by itself or as it is within the model.

        Args:
            whole: config of the model then.
        """
        from ckpt_prune import modeling_pruned

        model_class: Any = type(self.skeleton)
        with parameters_on_meta():
            block = None if within else modeling_pruned.make_block(self._layers[index], config, self._facts, index)
            if block is not None and not any(buffer.is_meta for buffer in block.buffers()):
                return block
            layers: Any = model_class(whole).get_submodule(self.family.layers)
            return layers[index]  # type: ignore[no-any-return]

    def module_path(self, index: int, module: str) -> str:
        """Return the path inside a block of a linear module that the family names as it stands on disk."""
        (path, *_) = self.find_paths(index, self.family.tensor(index, module))
        return path.removesuffix(".weight")

    def count_outputs(self, block: nn.Module, index: int, module: str) -> int:
        """Count the outputs of a linear module of a block that was built here."""
        weight: Any = block.get_submodule(self.module_path(index, module)).weight
        return int(weight.shape[0])

    def lacks_units(self, block: nn.Module, index: int, name: SpaceName) -> bool:
        """Return whether a block that was built here has fewer units of a space than the dense model."""
        space = self.family.columns[name]
        weight: Any = block.get_submodule(self.module_path(index, space.consumer)).weight
        return bool(weight.shape[1] < space.site_units(self.model.dimension) * self.model.unit_columns(name))

    def find_paths(self, index: int, disk: str) -> list[str]:
        """Find the paths inside a block of the parameters that a tensor on disk holds, in the order of its rows."""
        return [name.removeprefix(f"{self.family.layers}.{index}.") for name in self.find_parameters(disk)]

    def split(self, disk: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor on disk into the rows of the parameters that it holds."""
        parts = self.names.split(disk, tensor, len(self.find_parameters(disk)))
        within = self.model.checkpoint.within
        if within is None or self._turned_in is None or disk not in within.names:
            return parts
        return self._turned_in.turn(within.names[disk], parts)

    @cached_property
    def _turned_in(self) -> Names | None:
        """The whole that has rotary pairs in another order than its files, where the part by itself has none."""
        within = self.model.checkpoint.within
        names = None if within is None or self.names.turns else composite_names(within.whole.config)
        return names if names is not None and names.turns else None

    def find_makers(self, index: int) -> dict[str, list[str]]:
        """Find the tensors on disk that make the inputs of consumers outside attention, by the consumer's path.

        Row j of each of them makes column j.
        """
        makers: dict[str, list[str]] = {}
        for space in self.family.columns.values():
            paths = self.find_paths(index, self.family.tensor(index, space.consumer))
            units = torch.arange(space.count(self.model.dimension))
            lines = [each.lines(units, len(units), self.model.dimension) for _, each in space.incidences]
            one_to_one = space.for_each is None and all(torch.equal(own, units) for own in lines)
            if paths and one_to_one and space.consumer != self.family.attention.output:
                names = [self.family.tensor(index, name, kind) for name in space.readers for kind in KINDS]
                makers[paths[0].removesuffix(".weight")] = names
        return makers

    def fill(
        self, module: nn.Module, path: str, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
    ) -> None:
        """Give a module on the meta device its parameters, moved and cast to `dtype` or the factory's.

        The module is at `path` of the model. Tensors outside it are passed over.

        Raises:
            ValueError: a parameter is left without a tensor.
        """
        for disk, tensor in self._join_parts(module, path, tensors).items():
            parameters = () if is_stored_buffer(disk) else self.find_parameters(disk)
            for parameter, part in zip(parameters, self.split(disk, tensor) if parameters else (), strict=True):
                if parameter.startswith(f"{path}."):
                    local, _, attribute = parameter.removeprefix(f"{path}.").rpartition(".")
                    owner = module.get_submodule(local)
                    if attribute in owner._buffers:
                        owner.register_buffer(attribute, part.to(self.device))
                        continue
                    value = nn.Parameter(part.to(self.device, dtype or self.dtype), requires_grad=False)
                    owner.register_parameter(attribute, value)
                    if isinstance(owner, nn.Conv2d) and owner.groups == owner.in_channels:
                        owner.groups = len(value)  # a convolution of every channel that is left
        for name, value in module.named_parameters():
            if value.is_meta:
                raise ValueError(f"no tensor for {name}")

    def _join_parts(self, module: nn.Module, path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with those joined that make up one parameter: experts without a space, or fused rows."""
        given = dict(tensors)
        joined = {name: each.dim() for name, each in module.named_parameters() if each.dim() > 1}
        apart: dict[str, dict[str, list[str]]] = {}  # parameter → linear module without its number → of each expert
        for disk in tensors if joined else ():
            parameters = () if is_stored_buffer(disk) else self.find_parameters(disk)
            if len(parameters) != 1 or parameters[0].removeprefix(f"{path}.") not in joined:
                continue
            if self.names.is_part(disk) and parameters == self.names.parameters(disk):  # no expert with a space
                apart.setdefault(parameters[0], {}).setdefault(re.sub(r"\.\d+\.", ".", disk), []).append(disk)
        for parameter, linears in apart.items():
            order = dict.fromkeys(re.sub(r"\.\d+\.", ".", disk) for disk in self.names.shapes)
            parts = [[given.pop(disk) for disk in _by_number(linears[each])] for each in order if each in linears]
            if joined[parameter.removeprefix(f"{path}.")] > parts[0][0].dim():
                given[parameter] = torch.cat([torch.stack(each) for each in parts], 1)  # a gate's rows come first
            else:
                given[parameter] = torch.cat([tensor for each in parts for tensor in each])
        return given

    def find_parameters(self, disk: str) -> tuple[str, ...]:
        """Find the names in the model of what a tensor on disk holds, also of biases or pairs the dense model lacks.

        Those of experts are of modules of their own (`streams.experts`).
        """
        match = self._of_block.fullmatch(disk) if self._experts else None
        if match is not None and match[2] in self._experts and self.family.experts is not None:
            expert, role = self._experts[match[2]]
            return (f"{self.family.layers}.{match[1]}.{self.family.experts.module}.{expert}.{role}.{match[3]}",)
        parameters = self.names.parameters(disk)
        if not parameters and disk.endswith(f".{PAIRS}"):
            query = self.family.attention.query.rpartition(".")[2]
            (weight,) = self.names.parameters(f"{disk.removesuffix(PAIRS)}{query}.weight")
            return (f"{weight.removesuffix('.weight').rpartition('.')[0]}.{PAIRS}",)
        if not parameters and disk.endswith(".bias"):
            weights = self.names.parameters(f"{disk.removesuffix('.bias')}.weight")
            return tuple(f"{name.removesuffix('.weight')}.bias" for name in weights)
        return parameters


def set_counts(block: nn.Module, family: Family, dimension: Dimension, widths: BlockWidths) -> None:
    """Set the numbers of a stack's block, in place, that count its heads (`Space.attributes`)."""
    units = {family.spaces[name].units: count for name, count in widths.items()}
    for name, count in widths.items():
        for path, factors in family.spaces[name].attributes.items():
            owner, _, attribute = path.rpartition(".")
            number = count * product(factors, lambda each: units.get(each) or dimension(each))
            setattr(block.get_submodule(owner), attribute, number)


def _replace_transposed(block: nn.Module) -> None:
    """Put a plain linear, whose weight is (outputs, inputs), in place of each Conv1D, whose weight is transposed."""
    from transformers.pytorch_utils import Conv1D

    for path, module in list(block.named_modules()):
        if isinstance(module, Conv1D):
            owner, _, name = path.rpartition(".")
            setattr(block.get_submodule(owner), name, nn.Linear(module.nx, module.nf, device="meta"))


def _by_number(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
