"""What a model is traced with: example inputs, and which of their axes may have any size."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from transformers import DynamicCache

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.context import context_length
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.tasks import Task

_BATCH, _TOKENS, _PAST = 2, 3, 4
"""Sizes of the example. None is 1, which the tracer would take for a constant, and no two are equal."""


@dataclass(frozen=True)
class Example:
    """Arguments of a model's forward, and torch.export's `dynamic_shapes` for them."""

    inputs: dict[str, Any]
    dynamic: dict[str, Any]


def example_of(model: Any, task: Task) -> Example:
    """Inputs to trace a model with.

    Text: `input_ids`, `attention_mask`, and what else the model's forward knows of `position_ids` (generation) and
    `token_type_ids`, int64 (B, T), both axes dynamic; with a cache also keys and values of earlier tokens,
    (B, heads, past, head_dim) in every layer, and the mask is (B, past + T). Images: `pixel_values`, (B, C, H, W)
    of the size in the config, with only B dynamic.

    Raises:
        UserError: the model's context is too short to trace, or its config has no image size.
    """
    return _image(model) if task.modality == "image" else _text(model, task)


def returned_cache(output: Any) -> Any:
    """The keys and values in what a forward returns: `cache` from transformers 5.24 on, `past_key_values` before."""
    return output.cache if hasattr(output, "cache") else output.past_key_values


def image_size(config: Any) -> tuple[int, int]:
    """Height and width that a vision model reads.

    Raises:
        UserError: the config does not say.
    """
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    raise UserError(f"config.json of this {config.model_type} has no image_size: it cannot be traced")


def _image(model: Any) -> Example:
    height, width = image_size(model.config)
    channels = getattr(model.config, "num_channels", 3)
    pixels = torch.zeros(_BATCH, channels, height, width, dtype=model.dtype)
    return Example({"pixel_values": pixels}, {"pixel_values": {0: Dim.AUTO}})


def _text(model: Any, task: Task) -> Example:
    past = _PAST if task.cached else 0
    context = context_length(model.config.get_text_config())
    if context is not None and context < past + _TOKENS:
        raise UserError(f"a context of {context} tokens is too short to trace: {past + _TOKENS} are needed")
    takes = inspect.signature(model.forward).parameters
    ids = torch.ones(_BATCH, _TOKENS, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in takes:
        inputs["attention_mask"] = ids.new_ones(_BATCH, past + _TOKENS)
    if task.name == "text-generation" and "position_ids" in takes:
        inputs["position_ids"] = torch.arange(past, past + _TOKENS).repeat(_BATCH, 1)
    # GPT-2's takes them too, and for zeros adds the embedding of a token.
    if "token_type_ids" in takes and getattr(model.config, "type_vocab_size", None):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    dynamic: dict[str, Any] = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in inputs}
    if task.cached:
        name, cache = _filled_cache(model, past)
        inputs[name] = cache
        # A cache is given to torch.export as the flat list of its tensors.
        dynamic[name] = [{0: Dim.AUTO, 2: Dim.AUTO} for layer in cache.layers for _ in ("key", "value")]
    if "use_cache" in takes:
        inputs["use_cache"] = task.cached
    return Example(inputs, dynamic)


@torch.no_grad()
def _filled_cache(model: Any, tokens: int) -> tuple[str, DynamicCache]:
    """The argument that takes a cache, and one with keys and values of so many tokens, of the sizes of each layer.

    Without a config every layer of the cache grows, also where attention looks at a window only: the mask keeps to it,
    and the graph needs no more state than the tensors.
    """
    name: Any = cache_argument(model.forward)
    cache = DynamicCache()
    ids = torch.ones(_BATCH, tokens, dtype=torch.int64)
    try:
        model(**{"input_ids": ids, name: cache, "use_cache": True})
    except Exception:  # a model that keeps other things fails over this cache in ways of its own
        cache = DynamicCache()
    if name is None or len(cache.layers) == 0 or any(getattr(layer, "keys", None) is None for layer in cache.layers):
        raise UserError(
            f"{type(model).__name__} keeps other things than keys and values of earlier tokens: say --no-cache"
        )
    return name, cache
