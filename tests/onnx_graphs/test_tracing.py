"""Inputs that a model is traced with: no size that a tracer could take for a constant, and every axis dynamic."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import onnx_ir
import pytest
import torch
from onnxscript.optimizer import optimize
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch import nn
from torch.export import Dim
from torch.onnx._internal.exporter._registration import ONNXRegistry
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.exporters import utils as exporter_utils

from ckpt_prune.benchmarking.runners import TorchTimer
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.common.errors import UserError
from ckpt_prune.onnx.reference import GraphReference, HeldModel
from ckpt_prune.onnx.tasks import GraphTask
from ckpt_prune.onnx.tracing import _faster, get_image_size, make_example, trace_model
from tests import families
from tests.refusals import refusal

from .exports import in_pytorch, make_exports

GENERATION = GraphTask("text-generation", "text", True)
IMAGES = GraphTask("image-classification", "image", False)
DYNAMIC = {0: Dim.AUTO, 1: Dim.AUTO}
PAST = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def small(**changes) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(families.SIZES | changes))).eval()


def shapes(inputs: dict[str, object]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(v.shape), v.dtype) for name, v in inputs.items() if isinstance(v, torch.Tensor)}


def test_a_decoder_with_a_cache():
    example = make_example(small(), GENERATION)
    assert shapes(example.inputs) == {
        "input_ids": ((2, 3), torch.int64),
        "attention_mask": ((2, 7), torch.int64),
        "position_ids": ((2, 3), torch.int64),
    }
    assert example.inputs["position_ids"].tolist() == [[4, 5, 6]] * 2
    cache = example.inputs[PAST]
    assert [tuple(t.shape) for layer in cache.layers for t in (layer.keys, layer.values)] == [(2, 2, 4, 4)] * 6
    assert example.inputs["use_cache"] is True
    names = ("input_ids", "attention_mask", "position_ids")
    assert example.dynamic == dict.fromkeys(names, DYNAMIC) | {PAST: [{0: Dim.AUTO, 2: Dim.AUTO}] * 6}


def test_layers_of_different_widths(tmp_path_factory):
    """Two widths of keys, and keys narrower than values, as the cache of a real pass has them."""
    graphs = make_exports(tmp_path_factory)
    for name, expected in (
        ("uneven-llama", [(2, 2, 4, 4), (2, 2, 4, 4), (2, 1, 4, 4), (2, 1, 4, 4)]),
        ("narrow-opt", [(2, 3, 4, 2), (2, 3, 4, 4)]),
    ):
        layers = make_example(in_pytorch(graphs(name)[0]), GENERATION).inputs[PAST].layers
        assert [tuple(t.shape) for layer in layers for t in (layer.keys, layer.values)] == expected


def test_a_window_does_not_cut_the_cache():
    config = AutoConfig.for_model("mistral", **(families.SIZES | {"sliding_window": 2}))
    cache = make_example(AutoModelForCausalLM.from_config(config).eval(), GENERATION).inputs[PAST]
    assert [layer.keys.shape[2] for layer in cache.layers] == [4, 4, 4]


@pytest.mark.parametrize(("size", "expected"), [(224, (224, 224)), ([192, 256], (192, 256)), ((8, 4), (8, 4))])
def test_sizes_of_images(size, expected):
    assert get_image_size(SimpleNamespace(image_size=size), IMAGES) == expected
    assert get_image_size(SimpleNamespace(image_size=size), replace(IMAGES, image=(5, 6))) == (5, 6)


@pytest.mark.parametrize("given", [{}, {"image_size": None}, {"image_size": "large"}, {"image_size": [1, 2, 3]}])
def test_a_config_without_a_size(given):
    assert refusal(get_image_size, SimpleNamespace(model_type="levit", **given), IMAGES) == (
        "levit cannot be traced: config.json has no image_size, and the folder no image processor that makes one"
    )


@pytest.mark.parametrize(("cached", "needed"), [(True, 7), (False, 3)])
def test_a_context_too_short_to_trace(cached, needed):
    task = GraphTask("text-generation", "text", cached)
    with pytest.raises(UserError) as error:
        make_example(small(max_position_embeddings=needed - 1), task)
    assert str(error.value) == (f"a context of {needed - 1} tokens is too short to trace: {needed} are needed")
    make_example(small(max_position_embeddings=needed), task)


class Newer(LlamaForCausalLM):
    """Takes the cache as `cache` alone, as transformers will once the old name has gone."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None):
        return super().forward(input_ids, attention_mask, position_ids, use_cache=use_cache, **{PAST: cache})


class Older(LlamaForCausalLM):
    """Takes `past_key_values`, as transformers did before 5.24, and as a checkpoint's own code may in any version."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        return super().forward(input_ids, attention_mask, position_ids, use_cache=use_cache, **{PAST: past_key_values})


def test_the_other_name_of_the_cache(tmp_path):
    """The graph's own names stay, and what it is compared with and timed beside takes the same name."""
    renamed, name = (Older, "past_key_values") if PAST == "cache" else (Newer, "cache")
    model = renamed(small(num_hidden_layers=1).config).eval()
    example = make_example(model, GENERATION)
    assert [layer.keys.shape[2] for layer in example.inputs[name].layers] == [4]
    graph = trace_model(model, GENERATION, opset=20, fusions=None, log=tmp_path / "log").graph
    caches = ["0.key", "0.value"]
    assert [port.name for port in graph.inputs][3:] == [f"past_key_values.{cache}" for cache in caches]
    assert [port.name for port in graph.outputs][1:] == [f"present.{cache}" for cache in caches]
    reference, ids = GraphReference(HeldModel(lambda: model), GENERATION, set()), torch.arange(8).view(2, 4)
    assert list(reference.run_with_cache({"input_ids": ids})[1]) == [f"present.{cache}" for cache in caches]
    steps = reference.generate(ids, torch.ones_like(ids), 3)
    lengths = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _, read, __: lengths.append(read[0].shape[1]))
    chosen = torch.cat([logits.argmax(-1, keepdim=True) for _, logits in steps], 1)
    assert lengths == [4, 1, 1]
    assert torch.equal(chosen, without_a_cache(model, ids))
    workload = Workload("text", batch=2, tokens=4, steps=2, generates=True, cached=True, vocabulary=30, image=(0, 0, 0))
    lengths.clear()
    TorchTimer(model, torch.device("cpu")).time(workload)
    assert lengths == [4, 1, 1]


def without_a_cache(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The three likeliest tokens that follow, without a cache."""
    for _ in range(3):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[:, -3:]


class Recurrent(nn.Module):
    """Keeps something else than keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.config = small().config

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
        return input_ids


OTHER_STATES = (
    "keeps other things than keys and values of earlier tokens: say --no-cache (of state spaces that loop over tokens, "
    "such as Mamba's, no graph can be made)"
)


def test_a_model_without_keys_and_values():
    assert refusal(make_example, Recurrent(), GENERATION) == f"Recurrent {OTHER_STATES}"


class Broken(Recurrent):
    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
        raise RuntimeError("of this size not\nat all")


def test_a_model_that_fails_over_a_cache():
    assert refusal(make_example, Broken(), GENERATION) == f"Broken {OTHER_STATES}"
    # Without one it is not run before it is traced.
    make_example(Broken(), GraphTask("text-generation", "text", False))


@pytest.mark.skipif(
    not hasattr(exporter_utils, "import_dotted_path"), reason="transformers before 5.24 imports them elsewhere"
)
def test_models_that_are_not_loaded_are_not_imported_to_be_patched(monkeypatch):
    other, loaded = "transformers.models.rwkv.modeling_rwkv", "transformers.models.llama.modeling_llama"
    find = exporter_utils.import_dotted_path
    assert find(loaded, missing_ok=True) is not None
    monkeypatch.delitem(sys.modules, other, raising=False)
    with _faster():
        assert exporter_utils.import_dotted_path(other, missing_ok=True) is None
        assert other not in sys.modules
        assert exporter_utils.import_dotted_path(loaded, missing_ok=True) is sys.modules[loaded]
        assert exporter_utils.import_dotted_path("torch.nn", missing_ok=True) is torch.nn
    assert exporter_utils.import_dotted_path is find


def test_operators_are_read_once_and_what_an_export_adds_is_its_own(monkeypatch):
    anew = ONNXRegistry.from_torchlib(opset_version=20)
    with _faster():
        ONNXRegistry.from_torchlib(opset_version=20)
        monkeypatch.setattr(ONNXRegistry, "_register", None)  # nothing is read again
        first, second = (ONNXRegistry().from_torchlib(opset_version=20) for _ in range(2))
    numbers = {name: len(functions) for name, functions in anew.functions.items()}
    numbers["aten::unsqueeze"] += 1  # of complex numbers
    for registry in (first, second):
        assert (registry.opset_version, {n: len(each) for n, each in registry.functions.items()}) == (20, numbers)
        for functions in registry.functions.values():
            functions.clear()


def test_rules_pass_over_nodes_of_other_types_and_find_the_same(monkeypatch):
    """A matrix is turned twice, which a rule takes away."""
    text = """<ir_version: 10, opset_import: ["": 20]>
    turns (float[4, 6] x) => (float[4, 6] y) {
        once = Transpose <perm = [1, 0]> (x)
        twice = Transpose <perm = [1, 0]> (once)
        y = Relu (twice)
    }"""
    found, looked, look = [], [], SimplePatternMatcher._match_node
    monkeypatch.setattr(SimplePatternMatcher, "_match_node", lambda *words: looked.append(words) or look(*words))
    for ways in (nullcontext, _faster):
        model, before = onnx_ir.from_onnx_text(text), len(looked)
        with ways():
            optimize(model)
        found.append((onnx_ir.to_proto(model).SerializeToString(), len(looked) - before))
    assert "Transpose" not in [node.op_type for node in model.graph]
    assert found[0][0] == found[1][0]
    assert found[1][1] < found[0][1] / 4
