"""Builds a pruned checkpoint in MLX-LM: `mlx_lm.generate --model FOLDER --trust-remote-code`.

This file travels with checkpoints whose blocks differ, as the `model_file` that their config.json names. It needs
mlx-lm alone. The model is the stock one of the family; each block is built anew with the widths and heads that its
entry in `per_layer_config` says, with biases where `ckpt_prune_biases` names linear modules, and with two thin linear
modules where `ckpt_prune_ranks` does.
"""

import importlib
import inspect
from dataclasses import fields, replace
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import MODEL_REMAPPING

CANNOT = (
    "qk_head_dim",
    "v_head_dim",
    "num_rotary_pairs",
    "num_kept_heads",
    "ckpt_prune_absent",
    "ckpt_prune_rotations",
    "ckpt_prune_slicing",
)
"""Keys of blocks that need another attention or another stream than the stock model of MLX-LM has."""


HEADS = ("num_attention_heads", "num_key_value_heads")


class Factored(nn.Module):
    """A linear module whose weight is the product of two thin ones."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, x: Any) -> Any:
        product = self.up(self.down(x))
        return product + self.bias if "bias" in self else product


class ModelArgs:
    """The class of the stock model, its arguments, and the whole config beside them."""

    def __init__(self, stock: Any, config: dict[str, Any]) -> None:
        self.model_class, self.config = stock.Model, config
        names = {field.name for field in fields(stock.ModelArgs)}
        self.has_head_dim = "head_dim" in names
        dense = config
        if not self.has_head_dim and config.get("head_dim"):  # it is the hidden size by the number of heads
            dense = config | {"num_attention_heads": config["hidden_size"] // config["head_dim"]}
        self.stock = stock.ModelArgs.from_dict(dense)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "ModelArgs":
        """Read a config.json. Raises ValueError if MLX-LM cannot compute the model."""
        lacking = [key for key in CANNOT if config.get(key)]
        if lacking:
            raise ValueError(f"MLX-LM has no model for what was pruned here ({', '.join(lacking)})")
        rope = config.get("rope_parameters") or {}
        if "rope_theta" in rope:
            config = {"rope_theta": rope["rope_theta"], **config}
        model_type = MODEL_REMAPPING.get(config["model_type"], config["model_type"])
        return cls(importlib.import_module(f"mlx_lm.models.{model_type}"), config)


def Model(args: ModelArgs) -> Any:  # noqa: N802  mlx-lm looks it up by this name
    """Build the model; mlx-lm loads its weights."""
    model = args.model_class(args.stock)
    layers = model.model.layers
    for index, layer in enumerate(layers):
        own = args.config | (args.config.get("per_layer_config") or {}).get(str(index), {})
        layers[index] = layer = _rebuild(layer, args, own, index)
        for path in own.get("ckpt_prune_biases") or []:
            linear = _module(layer, path)
            linear.bias = nn.Linear(1, linear.weight.shape[0]).bias
        for path, rank in (own.get("ckpt_prune_ranks") or {}).items():
            parent, _, name = path.rpartition(".")
            setattr(_module(layer, parent), name, Factored(_module(layer, path), rank))
    return model


def _rebuild(layer: Any, args: ModelArgs, own: dict[str, Any], index: int) -> Any:
    """Make a block of its own widths and heads; its rotary embedding stays, since it may be another one than usual."""
    keys = [key for key in vars(args.stock) if key in own and key != "layer_types"]
    changed = replace(args.stock, **{key: own[key] for key in keys if args.has_head_dim or key not in HEADS})
    names = list(inspect.signature(type(layer)).parameters)[1:]
    given = {name: index for name in names if "idx" in name}
    given |= {name: getattr(layer, name) for name in names if name not in given and hasattr(layer, name)}
    new = type(layer)(changed, **given)
    attention = new.self_attn
    attention.rope = layer.self_attn.rope
    if not args.has_head_dim and own.get("head_dim"):
        attention.n_heads, attention.n_kv_heads = (own[key] for key in HEADS)
        inputs, width = own["hidden_size"], own["head_dim"]
        for name, heads in (("q_proj", own[HEADS[0]]), ("k_proj", own[HEADS[1]]), ("v_proj", own[HEADS[1]])):
            setattr(attention, name, nn.Linear(inputs, heads * width, bias="bias" in getattr(attention, name)))
        attention.o_proj = nn.Linear(own[HEADS[0]] * width, inputs, bias="bias" in attention.o_proj)
    return new


def _module(layer: Any, path: str) -> Any:
    for name in path.split(".") if path else []:
        layer = getattr(layer, name)
    return layer
