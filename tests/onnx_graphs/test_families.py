"""onnxruntime computes what PyTorch does: every kind of model and output, every way to export.

`tests/contract` has a graph of every other family, of outputs with narrow queries and fewer heads among them.
"""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.onnx.export import GraphWriter
from ckpt_prune.options.graphs import GraphSettings
from tests.graphs import Exported
from tests.pairs import choose_cases

from .exports import (
    WINDOW,
    Graph,
    Text,
    assert_near,
    assert_reads,
    assert_reads_in_chunks,
    assert_stated,
    expected_of,
    in_pytorch,
    make_exports,
    pixels,
    ports_of,
)

EXACT, HALF = 1e-5, 1e-2
"""Share of the largest output: what float32 rounding leaves, and float16's."""
DECODERS = ["llama-gqa-tied", "mistral-window", "opt-350m-like", "uneven-llama", "narrow-opt"]
IMAGES = ["deit-teacher", "dinov2-model", "dinov2-swiglu-classifier"]
ENCODERS = ["bert-mlm", "bert-two-heads"]
NARROW_VIT: tuple[str, dict[str, Any]] = ("narrow-vit", {"optimize": "cpu", "opset": 23})
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("turned-llama", {"optimize": "cpu"}),
    ("rotated-llama", {"cache": False, "opset": 18}),
    ("shallow-llama-gqa-tied", {"optimize": "cuda", "dtype": "fp16"}),
    ("opt", {"dtype": "fp16"}),
    ("vit", {"optimize": "cuda", "opset": 18, "task": "feature-extraction"}),
    ("vit", {"dtype": "fp16"}),
    NARROW_VIT,
]
"""Every way to export, two at a time, next to those above."""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> Exported:
    return make_exports(tmp_path_factory)


def assert_decodes(graph: Graph, module, limit: float) -> None:
    """Alone and in batches, without padding and padded on the left, in one pass, in chunks and token by token."""
    for batch, length in ((1, 1), (1, 23), (4, 2), (3, 17)):
        assert_reads(graph, module, Text.random(batch, length), limit)
    padded = Text.random(3, 14, side="left")
    assert (padded.mask == 0).any()
    assert_reads(graph, module, padded, limit)
    if not graph.cached:
        return
    assert_reads_in_chunks(graph, module, Text.random(1, 20), (7, 1, 1, 6, 5), limit)
    assert_reads_in_chunks(graph, module, Text.random(2, 9), (1,) * 9, limit)
    assert_reads_in_chunks(graph, module, padded, (10, 1, 1, 2), limit)


def assert_sees(graph: Graph, module, limit: float) -> None:
    for batch in (1, 2, 5):
        feed = {"pixel_values": pixels(batch)}
        outputs = graph(feed)
        expected = expected_of(module, feed, graph.outputs)
        assert expected
        for name, theirs in expected.items():
            assert_near(name, outputs[name], theirs, limit)


@pytest.mark.parametrize("name", choose_cases(DECODERS, lambda name: name not in ("opt-350m-like", "mistral-window")))
def test_decoders_compute_what_pytorch_does(graphs, name):
    model, graph = graphs(name)
    assert_decodes(Graph(graph), in_pytorch(model), EXACT)


@pytest.mark.parametrize("name", choose_cases(IMAGES, lambda name: "swiglu" not in name))
def test_models_of_images_compute_what_pytorch_does(graphs, name):
    model, graph = graphs(name)
    assert_sees(Graph(graph), in_pytorch(model), EXACT)


@pytest.mark.parametrize("name", choose_cases(ENCODERS, lambda name: name != "bert-two-heads"))
def test_encoders_compute_what_pytorch_does_and_read_segments(graphs, name):
    model, folder = graphs(name)
    graph, module = Graph(folder), in_pytorch(model)
    assert "position_ids" not in graph.inputs
    for batch, length in ((1, 1), (1, 23), (4, 2), (3, 17)):
        assert_reads(graph, module, Text.random(batch, length), EXACT)
    padded = Text.random(3, 14, side="right")
    assert (padded.mask == 0).any()
    assert_reads(graph, module, padded, EXACT)
    # It reads which sentence a token is in.
    feed = padded.feed(0, 14)
    feed["token_type_ids"] = (np.arange(14)[None] > 6).astype(np.int64).repeat(3, 0)
    outputs, before = graph(feed), graph(padded.feed(0, 14))
    main = graph.outputs[0]
    assert_near(main, outputs[main], expected_of(module, feed, [main])[main], EXACT, padded.mask)
    assert np.abs(outputs[main] - before[main]).max() > 0.01


# ---- what these models have that others have not -------------------------------------------------------------------


def test_the_window_is_in_the_graph(graphs):
    """A token just inside the window changes the logits of the last one, and one just before the window does not."""
    _, folder = graphs("mistral-window")
    graph, text = Graph(folder), Text.random(1, 20)
    logits = graph(text.feed(0, 20) | graph.no_past(1))["logits"]
    reach = WINDOW - 1
    for back, seen in ((reach, True), (reach + 1, False)):
        changed = Text(text.ids.copy(), text.mask)
        changed.ids[0, 19 - back] = 3 if changed.ids[0, 19 - back] != 3 else 4
        other = graph(changed.feed(0, 20) | graph.no_past(1))["logits"]
        assert bool((other[0, 19] != logits[0, 19]).any()) is seen


def test_rotary_angles_are_complex_numbers(tmp_path):
    """Llama 4's, which gain an axis by an index of None: torch's exporter has that operator for real numbers alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    torch.manual_seed(0)
    config = Llama4TextConfig(vocab_size=101, attention_chunk_size=64, pad_token_id=0, **sizes, **heads)
    Llama4ForCausalLM(config).save_pretrained(tmp_path / "model")
    GraphWriter(Checkpoint.open(tmp_path / "model"), tmp_path / "graph", GraphSettings()).write()
    assert_decodes(Graph(tmp_path / "graph"), in_pytorch(tmp_path / "model"), EXACT)


def test_layers_have_their_own_widths(graphs):
    _, folder = graphs("uneven-llama")
    ports = ports_of(folder)
    assert [ports[f"past_key_values.{layer}.key"][1][1] for layer in range(2)] == [2, 1]
    assert [ports[f"present.{layer}.value"][1][1] for layer in range(2)] == [2, 1]


def test_narrow_keys_beside_wide_values(graphs):
    ports = ports_of(graphs("narrow-opt")[1])
    assert ports["present.0.key"][1] == ["batch_size", 3, "total_sequence_length", 2]
    assert ports["present.0.value"][1] == ["batch_size", 3, "total_sequence_length", 4]


def test_narrow_queries_are_not_padded_in_the_graph(graphs):
    """In PyTorch on a CPU they are, for its fused kernel; a graph has none."""
    for name, settings in (NARROW_VIT, ("narrow-opt", {})):
        assert "Pad" not in operators(graphs(name, **settings)[1])


def operators(folder) -> set[str]:
    return {node.op_type for node in onnx.load(folder / "model.onnx").graph.node}


# ---- ways to export ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), choose_cases(WAYS, lambda way: way == ("vit", {"dtype": "fp16"})))
def test_every_way_to_export_computes_what_pytorch_does(graphs, name, settings):
    model, folder = graphs(name, **settings)
    graph = Graph(folder)
    assert_stated(folder, GraphSettings(**settings))
    half = settings.get("dtype") == "fp16"
    kinds = {kind for kind, _ in ports_of(folder).values()} - {"int64"}
    assert kinds == {"float16" if half else "float32"}
    assert graph.cached is ("vit" not in name and settings.get("cache", True))
    module = in_pytorch(model)
    if "task" in settings:
        assert graph.outputs[0] == "last_hidden_state"
        module = module.base_model
    check = assert_sees if "vit" in name else assert_decodes
    check(graph, module, HALF if half else EXACT)
    if half:  # not float32 under another name
        with pytest.raises(AssertionError):
            check(graph, module, EXACT)


def test_the_oracle_can_fail(graphs):
    """A weight off by a hundredth of a per cent shows."""
    model, folder = graphs("llama-gqa-tied")
    module = in_pytorch(model)
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[0] *= 1.01
    with pytest.raises(AssertionError):
        assert_reads(Graph(folder), module, Text.random(1, 9), EXACT)
