"""Attention of remote code takes the cache under the name that the stock class of this transformers gives it."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from ckpt_prune import modeling_pruned
from ckpt_prune.modeling_pruned import cache_argument
from tests.families import SIZES

INSTALLED: Any = cache_argument(LlamaAttention.forward)
PATHS = {"query": "attn.q_proj", "key": "attn.k_proj", "value": "attn.v_proj", "output": "attn.o_proj"}


class Newer(LlamaAttention):
    """Takes the cache as `cache` alone, as transformers will once the old name has gone."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs):
        kwargs[INSTALLED] = cache
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


class Older(LlamaAttention):
    """Takes `past_key_values`, as transformers before 5.24, which gives the attention function a paged `cache`."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        kwargs[INSTALLED] = past_key_values
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


def attention(stock: type, kind: str) -> nn.Module:
    """Attention that is narrower in values, in queries and keys, or lacks a rotary pair, or both of these."""
    config = LlamaConfig(**SIZES | {"num_key_value_heads": 4, "num_rotary_pairs": 1}, attn_implementation="sdpa")
    torch.manual_seed(0)
    layer = nn.Module()
    layer.attn = stock(config, 0).eval()
    if kind == "queries":
        modeling_pruned._narrow(layer, config, PATHS, 4, 4, 2, 4)
    if "values" in kind:
        modeling_pruned._narrow_values(layer, PATHS, 4, 2)
    if "pairs" in kind:
        modeling_pruned._drop_pairs(
            layer, config, {"rotary": (PATHS, {"pairs": 2, "neighbours": False, "tables": False})}
        )
    elif "values" in kind:
        modeling_pruned._pad_values(layer, PATHS, 4, 2)
    return layer.attn


@pytest.mark.parametrize("kind", ["queries", "values", "pairs", "pairs and values"])
@pytest.mark.parametrize(("stock", "name"), [(Newer, "cache"), (Older, "past_key_values")])
@torch.inference_mode()
def test_a_token_reads_those_before_it_from_the_cache(stock, name, kind):
    module = attention(stock, kind)
    states = torch.randn(2, 5, 16)
    tables = LlamaRotaryEmbedding(module.config)(states, torch.arange(5)[None].expand(2, 5))

    def run(start: int, end: int, **given: Any) -> torch.Tensor:
        passed = {"position_embeddings": tuple(table[:, start:end] for table in tables), **given}
        passed = {key: value for key, value in passed.items() if kind != "queries" or key == name}
        return module(states[:, start:end], **passed)[0]

    kept = DynamicCache()
    pieces = [run(0, 4, **{name: kept}), run(4, 5, **{name: kept})]
    torch.testing.assert_close(torch.cat(pieces, 1), run(0, 5))
    assert kept.layers[0].keys.shape == (2, 4, 5, 4 if kind == "values" else 2)
    assert kept.layers[0].values.shape == (2, 4, 5, 2 if "values" in kind else 4)


@pytest.fixture
def seen(monkeypatch) -> dict[str, Any]:
    """The keywords that the attention function is called with."""
    keywords: dict[str, Any] = {}

    def attend(module, query, key, value, mask, **kwargs):
        keywords.update(kwargs)
        return value.transpose(1, 2), None

    monkeypatch.setitem(modeling_pruned.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attend)
    return keywords


TABLES = {"position_embeddings": (torch.ones(1, 3, 4), torch.zeros(1, 3, 4))}


@pytest.mark.parametrize(("kind", "tables"), [("queries", {}), ("pairs", TABLES)])
def test_what_older_classes_call_cache_reaches_the_attention_function(seen, kind, tables):
    attention(Older, kind)(torch.zeros(1, 3, 16), **tables, cache="in pages")
    assert seen["cache"] == "in pages"


@pytest.mark.parametrize(("kind", "tables"), [("queries", {}), ("pairs", TABLES)])
def test_a_cache_in_pages_changes_what_the_attention_function_gets(seen, kind, tables):
    """From 5.24 on it says where its pages are."""

    class Pages:
        def update(self, key, value, layer, kwargs):
            kwargs["block_table"] = "this layer's"
            return key, value

    attention(Newer, kind)(torch.zeros(1, 3, 16), **tables, cache=Pages())
    assert seen["block_table"] == "this layer's"
