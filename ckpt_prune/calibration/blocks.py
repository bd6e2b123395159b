"""Transformer blocks as stock transformers modules, holding just the tensors they are given."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ckpt_prune.architectures.family import Family
from ckpt_prune.architectures.skeleton import build_skeleton, is_stored_frequency


class BlockFactory:
    """Builds single blocks of a model, of any widths the tensors have, without ever holding the model.

    Args:
        family: the model's description.
        config: the dense model's config.
        device: where the blocks run.
        dtype: floating-point type the blocks compute in.
    """

    def __init__(self, family: Family, config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self.family, self.config, self.device, self.dtype = family, config, device, dtype
        self.skeleton = build_skeleton(config, family.architecture)
        self._layers: Any = self.skeleton.get_submodule(family.layers)

    def block(self, index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Block `index` with the given on-disk tensors as its parameters.

        Widths are read off the consumers' columns, biases are there where a bias tensor is.
        """
        prefix = self.family.block.format(block=index)
        local = {name.removeprefix(prefix): t for name, t in tensors.items() if not is_stored_frequency(name)}
        layer_config = copy.copy(self.config)
        for space, description in self.family.spaces.items():
            columns = local[f"{description.consumer}.weight"].shape[1]
            units = columns // self.family.unit_columns(self.config, space)
            for key, factors in description.config.items():
                setattr(layer_config, key, units * self.family.per_unit(self.config, factors))
        # Where the config leaves it out, it would be derived from the head count, which may have changed.
        layer_config.head_dim = self.family.dimension(self.config, "head_dim")
        with torch.device("meta"):
            module: nn.Module = type(self._layers[index])(layer_config, index)
        self.fill(module, local)
        return module.eval()

    def fill(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Give a module on the meta device its parameters, by name within the module, cast and moved.

        Raises:
            ValueError: a parameter is left without a tensor.
        """
        for name, tensor in tensors.items():
            owner_path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(owner_path)
            value = tensor.to(self.device, self.dtype)
            owner.register_parameter(attribute, nn.Parameter(value, requires_grad=False))
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"no tensor for {name}")
