"""The decoder of an encoder-decoder as one graph, which reads a target from its start, and goes on by its cache."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ckpt_prune.common.errors import UserError
from ckpt_prune.modeling_pruned import cache_argument

KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
"""What a layer keeps: keys and values of its own tokens, and of the encoder's states."""
BRANCH = "use_cache_branch"
"""An input that changes nothing: optimum and transformers.js know by it that one graph does both."""

_STATES = ("key_value_states", "encoder_hidden_states")
"""Names under which modules take the encoder's states."""


class DecoderStep(nn.Module):
    """A decoder behind its encoder, called with the cache that it returns.

    Keys and values of the encoder's states are made of those states that the cache has none of: of all in the first
    call, of none later. So one graph without branches reads a target from its start and goes on with it.

    Args:
        model: the encoder-decoder, with its head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self._cross = _find_cross_attention(model.get_decoder())
        if not self._cross:
            raise UserError(f"{type(model).__name__} has no attention to its encoder that is known: it is not exported")

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def reads_mask(self) -> bool:
        """Whether sources may be padded; sounds are not."""
        return str(self.model.main_input_name) == "input_ids"

    @property
    def width(self) -> int:
        """The width of the encoder's states."""
        return int(self.model.get_encoder().config.get_text_config().hidden_size)

    @torch.no_grad()
    def make_past(self, ids: Tensor, states: Tensor) -> list[Tensor]:
        """Return what the decoder keeps of tokens, (B, T), and of the encoder's states, (B, S, width), by `KINDS`."""
        try:
            return _list_tensors(self._run(ids, states, EncoderDecoderCache(DynamicCache(), DynamicCache()))[1])
        except Exception as error:  # a model that keeps other things fails in ways of its own
            name = type(self.model).__name__
            raise UserError(f"{name} keeps other things than keys and values of earlier tokens: {error}") from error

    def forward(
        self,
        input_ids: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: list[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return `logits`, (B, T, vocabulary), and `present.i.KIND` of every layer.

        Args:
            input_ids: int64 (B, T), of the target, those in the cache apart.
            encoder_hidden_states: (B, S, width).
            encoder_attention_mask: int64 (B, S).
            past_key_values: of every layer by `KINDS`, (B, heads, past, head_dim), past being 0 or S of the encoder's.
        """
        assert past_key_values is not None
        check: Callable[[bool], None] = torch._check
        for place, tensor in enumerate(past_key_values):  # one length of all layers, where a tracer would see many
            check(tensor.shape[2] == past_key_values[place % 4 // 2 * 2].shape[2])
            check(tensor.shape[0] == input_ids.shape[0])
        cache, kept = _fill_cache(past_key_values), past_key_values[2].shape[2]
        mask = {} if encoder_attention_mask is None else {"attention_mask": encoder_attention_mask}
        with self._without_kept(kept):
            output = self._run(input_ids, encoder_hidden_states, cache, **mask)[0]
        return {"logits": output.logits} | name_kept(cache)

    def _run(self, ids: Tensor, states: Tensor, cache: EncoderDecoderCache, **more: Tensor) -> tuple[Any, Any]:
        """Run the model behind its encoder; return its output, and the cache."""
        name = cache_argument(self.model.forward) or "past_key_values"
        encoded = BaseModelOutput(last_hidden_state=states)
        given = {"decoder_input_ids": ids, "encoder_outputs": encoded, "use_cache": True, name: cache}
        return self.model(**given, **more), cache

    @contextmanager
    def _without_kept(self, kept: int) -> Iterator[None]:
        """Hide from attention the encoder's states that the cache has keys and values of."""

        def cut(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            cuts = {name: kwargs[name][:, kept:] for name in _STATES if kwargs.get(name) is not None}
            return (args, kwargs | cuts) if cuts else None

        hooks = [module.register_forward_pre_hook(cut, with_kwargs=True) for module in self._cross]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Take the encoder out of the model meanwhile: it is no part of the decoder's graph."""
        encoder, places = self.model.get_encoder(), []
        for module in self.model.modules():
            places += [(module, name) for name, child in module.named_children() if child is encoder]
        try:
            for module, name in places:
                setattr(module, name, nn.Identity())
            yield
        finally:
            for module, name in places:
                setattr(module, name, encoder)


def _find_cross_attention(decoder: nn.Module) -> list[nn.Module]:
    """Return the innermost modules that take the encoder's states."""

    def takes_states(module: nn.Module) -> bool:
        return not inspect.signature(module.forward).parameters.keys().isdisjoint(_STATES)

    return [
        module
        for module in decoder.modules()
        if takes_states(module) and not any(takes_states(inner) for inner in module.modules() if inner is not module)
    ]


def _fill_cache(past: list[Tensor]) -> EncoderDecoderCache:
    """Return a cache of these very tensors, whose layers know nothing yet of the encoder."""
    caches = DynamicCache(), DynamicCache()
    for place in range(0, len(past), 2):
        cache, layer = caches[place % 4 // 2], place // 4
        cache.update(past[place], past[place + 1], layer)
        cache.layers[layer].keys, cache.layers[layer].values = past[place], past[place + 1]
    cache = EncoderDecoderCache(*caches)
    cache.is_updated = dict.fromkeys(range(len(past) // 4), False)
    return cache


def name_kept(cache: EncoderDecoderCache) -> dict[str, Tensor]:
    """Return what a decoder keeps, by the names that its graph's outputs have: `present.i.KIND`."""
    kept = _list_tensors(cache)
    names = (f"present.{layer}.{kind}" for layer in range(len(kept) // 4) for kind in KINDS)
    return dict(zip(names, kept, strict=True))


def _list_tensors(cache: EncoderDecoderCache) -> list[Tensor]:
    both = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    return [tensor for pair in both for layer in pair for tensor in (layer.keys, layer.values)]
