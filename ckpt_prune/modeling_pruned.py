"""Pruned causal language models that no stock config can describe.

Their blocks differ in width, or have biases where the stock class has no slot for one.

This one file is both what `ckpt_prune.load` uses and what travels with such a checkpoint as its remote code. It needs
transformers alone. Each class is the stock one with every block rebuilt from its own `per_layer_config`, and with a
bias on each linear module that `ckpt_prune_biases` names (paths within a block).
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SeedOssForCausalLM,
)


def layer_config(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """The config of one block: the model's, with that block's overrides, and none of the others'."""
    overrides: Any = getattr(config, "per_layer_config", None) or {}
    if not isinstance(overrides, dict):
        # transformers that know the key hand out finished configs instead of the mapping.
        return copy.copy(overrides[index])
    own = copy.copy(config)
    own.per_layer_config = None
    own_overrides: dict[str, Any] = overrides.get(str(index)) or overrides.get(index) or {}
    for key, value in own_overrides.items():
        setattr(own, key, value)
    return own


class PrunedMixin:
    """Rebuilds the blocks of the stock model it stands before in the list of base classes."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(layer_config(config, 0))  # type: ignore[call-arg]
        model: Any = self
        shared = model.model.config
        layers = model.model.layers
        biases = getattr(config, "ckpt_prune_biases", None) or []
        for index in range(len(layers)):
            layer = type(layers[index])(layer_config(config, index), index)
            for path in biases:
                linear = layer.get_submodule(path)
                if linear.bias is None:
                    linear.bias = nn.Parameter(torch.zeros(linear.out_features))
            # Attention looks up its implementation when it runs: masks and blocks must read it from the same config.
            for module in layer.modules():
                if hasattr(module, "config"):
                    module.config = shared
            layers[index] = layer
        config._attn_implementation = shared._attn_implementation
        model.config = config
        model.post_init()


class PrunedLlamaForCausalLM(PrunedMixin, LlamaForCausalLM):
    """Llama with its own widths in every block."""


class PrunedMistralForCausalLM(PrunedMixin, MistralForCausalLM):
    """Mistral with its own widths in every block."""


class PrunedQwen2ForCausalLM(PrunedMixin, Qwen2ForCausalLM):
    """Qwen2 with its own widths in every block."""


class PrunedQwen3ForCausalLM(PrunedMixin, Qwen3ForCausalLM):
    """Qwen3 with its own widths in every block."""


class PrunedSeedOssForCausalLM(PrunedMixin, SeedOssForCausalLM):
    """Seed-OSS with its own widths in every block."""
