"""Blocks that are alike are traced once, and the graph computes what the whole model does."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ckpt_prune.onnx import tracing
from ckpt_prune.onnx.block_kinds import NotAlikeError
from ckpt_prune.onnx.tasks import GraphTask
from ckpt_prune.onnx.tracing import trace_model
from tests import encoders, families
from tests.graphs import trace_as_commands_do
from tests.pairs import choose_cases

from .exports import Graph, Text, assert_reads, assert_reads_in_chunks

EXACT = 1e-5
"""Share of the largest output that float32 rounding leaves."""
GENERATION = GraphTask("text-generation", "text", True)
FEATURES = GraphTask("feature-extraction", "text", False)
CLASSES = GraphTask("image-classification", "image", False)


@pytest.fixture(autouse=True, scope="module")
def _as_a_command_exports() -> Iterator[None]:
    with trace_as_commands_do():
        yield


def build(architecture: str, model_type: str, layers: int, **changes: Any) -> PreTrainedModel:
    sizes = encoders.SIZES.get(model_type, families.SIZES) | {"num_hidden_layers": layers} | changes
    model = getattr(transformers, architecture)(AutoConfig.for_model(model_type, **sizes)).eval()
    encoders.randomise(model, 5)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    (blocks,) = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(blocks)


def trace(model: nn.Module, task: GraphTask, folder: Path) -> tuple[Graph, list[int]]:
    """The graph, and which blocks were traced: those that ran more often than the others."""
    calls: Counter[int] = Counter()
    hooks = [
        next(block.children()).register_forward_hook(lambda *_, index=index: calls.update([index]))
        for index, block in enumerate(blocks_of(model))
    ]
    graph = trace_model(model, task, opset=None, fusions=None, log=folder / "log")
    for hook in hooks:
        hook.remove()
    onnx_ir.save(graph, folder / "model.onnx")
    most = max(calls.values())
    return Graph(folder), [index for index in range(len(hooks)) if calls[index] == most]


def build_windowed(architecture: str, model_type: str, layers: str, **changes: Any) -> PreTrainedModel:
    """A model whose layers look back on a window (S) or on all (F)."""
    kinds = {"S": "sliding_attention", "F": "full_attention"}
    types = [kinds[layer] for layer in layers]
    return build(architecture, model_type, len(layers), sliding_window=6, layer_types=types, **changes)


def make_uneven(model: PreTrainedModel) -> PreTrainedModel:
    """The model with an MLP of another width in every block, and fewer heads in the second."""
    for index, block in enumerate(blocks_of(model)):
        mlp, attention = block.mlp, block.self_attn
        width = 22 - index
        mlp.gate_proj, mlp.up_proj = nn.Linear(16, width, bias=False), nn.Linear(16, width, bias=False)
        mlp.down_proj = nn.Linear(width, 16, bias=False)
        if index == 1:
            attention.q_proj, attention.o_proj = nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False)
            attention.k_proj, attention.v_proj = nn.Linear(16, 4, bias=False), nn.Linear(16, 4, bias=False)
    encoders.randomise(model, 6)
    return model


DECODERS: dict[str, tuple[Callable[[], PreTrainedModel], list[int]]] = {
    "llama": (lambda: build("LlamaForCausalLM", "llama", 4, tie_word_embeddings=True), [0, 1]),
    "uneven, windows": (
        lambda: make_uneven(build_windowed("Qwen2ForCausalLM", "qwen2", "SFSS", use_sliding_window=True)),
        [0, 1, 2],
    ),
    "gemma, in turn": (
        lambda: build_windowed("Gemma3ForCausalLM", "gemma3_text", "SSFSSF", head_dim=4, tie_word_embeddings=True),
        [0, 1, 2, 5],
    ),
}


@pytest.mark.parametrize("name", choose_cases(list(DECODERS), lambda name: name == "llama"))
def test_decoders(name, tmp_path):
    make, expected = DECODERS[name]
    model = make()
    graph, traced = trace(model, GENERATION, tmp_path)
    assert traced == expected
    layers = range(len(blocks_of(model)))
    caches = [f"{layer}.{part}" for layer in layers for part in ("key", "value")]
    assert [port for port in graph.inputs if "past" in port] == [f"past_key_values.{cache}" for cache in caches]
    assert graph.outputs == ["logits", *(f"present.{cache}" for cache in caches)]
    assert_reads(graph, model, Text.random(1, 1), EXACT)
    assert_reads(graph, model, Text.random(3, 14, side="left"), EXACT)
    assert_reads_in_chunks(graph, model, Text.random(2, 20), (7, 1, 6, 1, 5), EXACT)


def test_what_leaves_the_last_block_of_an_uneven_encoder_keeps_its_shape(tmp_path):
    model = build("BertModel", "bert", 3)
    for index, block in enumerate(model.encoder.layer):
        block.intermediate.dense, block.output.dense = nn.Linear(16, 22 - index), nn.Linear(22 - index, 16)
    graph, traced = trace(model, FEATURES, tmp_path)
    assert traced == [0, 1]
    assert_reads(graph, model, Text.random(3, 14), EXACT)


def test_the_graph_is_that_of_a_full_trace(tmp_path, monkeypatch):
    model = build("ViTForImageClassification", "vit", 3)
    repeated = trace_model(model, CLASSES, opset=None, fusions=None, log=tmp_path / "log")

    def refuse(*_: Any) -> None:
        raise NotAlikeError("")

    monkeypatch.setattr(tracing, "find_block_kinds", refuse)
    full = trace_model(model, CLASSES, opset=None, fusions=None, log=tmp_path / "log")
    assert describe(repeated) == describe(full)
    weights = {name for name, _ in model.named_parameters()}
    for graph in (repeated.graph, full.graph):
        assert weights <= {name.removesuffix(".T") for name in graph.initializers}  # .T: transposed


def describe(model: onnx_ir.Model) -> Counter[Any]:
    """Every node by what it computes from inputs and weights, whatever values between are called."""
    value_hashes: dict[Any, Any] = {None: None}
    value_hashes |= {value: hash(("input", value.name)) for value in model.graph.inputs}
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        small = value.const_value.size < 64
        value_hashes[value] = hash((str(value.dtype), value.const_value.tobytes() if small else name))
    node_hashes = []
    for node in model.graph:
        attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
        inputs = [value_hashes[value] for value in node.inputs]
        node_hashes.append(hash((node.op_type, *map(tuple, attributes), *inputs)))
        value_hashes |= {value: hash((node_hashes[-1], number)) for number, value in enumerate(node.outputs)}
    return Counter([*node_hashes, *(hash((value.name, value_hashes[value])) for value in model.graph.outputs)])


# ---- models whose blocks cannot stand for each other ---------------------------------------------------------------


class Scaled(nn.Module):
    """A block whose place in the model matters to what it computes: always, or only to a tracer."""

    def __init__(self, block: nn.Module, index: int, *, hidden: bool) -> None:
        super().__init__()
        self.block, self.hidden, self.scale = block, hidden, {"place": 1 + index}

    def forward(self, hidden_states: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        entered = self.block(hidden_states, *more, **options)
        if self.hidden and not torch.compiler.is_exporting():
            return entered * 1
        return entered * self.scale["place"]


@pytest.mark.parametrize("hidden", [False, True])
def test_blocks_that_differ_by_their_place(hidden, tmp_path):
    model = build("BertModel", "bert", 3)
    layers = model.encoder.layer
    model.encoder.layer = nn.ModuleList(Scaled(block, index, hidden=hidden) for index, block in enumerate(layers))
    graph, traced = trace(model, FEATURES, tmp_path)
    assert traced == ([0, 1] if hidden else [0, 1, 2])  # before all of them were
    for block in model.encoder.layer:
        block.hidden = False
    assert_reads(graph, model, Text.random(2, 9), EXACT)


class Skipping(transformers.BertModel):
    """Adds what a block in the middle computes to the end."""

    def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
        seen = []
        hook = self.encoder.layer[1].register_forward_hook(lambda _, __, output: seen.append(output))
        try:
            result = super().forward(input_ids, attention_mask, token_type_ids)
        finally:
            hook.remove()
        result.last_hidden_state = result.last_hidden_state + seen[0]
        return result


def test_a_block_that_is_read_at_the_end(tmp_path):
    model = Skipping(build("BertModel", "bert", 3).config).eval()
    encoders.randomise(model, 5)
    graph, traced = trace(model, FEATURES, tmp_path)
    assert traced == [0, 1, 2]
    assert_reads(graph, model, Text.random(2, 9), EXACT)
