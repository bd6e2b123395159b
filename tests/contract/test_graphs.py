"""A graph of every family computes what PyTorch does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.onnx.export import GraphWriter
from ckpt_prune.options.graphs import GraphSettings
from tests.graphs import trace_as_commands_do
from tests.onnx_graphs.exports import (
    Graph,
    Text,
    assert_near,
    assert_reads,
    assert_reads_in_chunks,
    assert_stated,
    expected_of,
    in_pytorch,
)

from .dense import Dense, spaces_recipe
from .models import Case, unlike_cases

EXACT = 1e-5
"""Share of the largest output that float32 leaves."""


ELSEWHERE = {"bert", "cohere2", "dinov2", "gpt2", "llama", "mistral", "opt", "qwen3_moe", "vit"}
"""Graphs of theirs are held in `tests/onnx_graphs`, of stock blocks and of outputs, in float32; or what they compute is
in a graph of another family here."""
WAYS = {"qwen3": {"opset": 23}, "seed_oss": {"optimize": "cpu"}}
"""Ways to export, dealt to families; `tests/onnx_graphs` has the others."""
PAIRED = "seed_oss"
"""A family that loses rotary pairs, too."""
SHALLOW = [
    replace(case, blocks=1) for case in unlike_cases() if case.variant is None and case.model_type not in ELSEWHERE
]
"""Tracing is slow, and what holds for one block next to another is held in `tests/onnx_graphs`."""


@pytest.mark.parametrize("case", SHALLOW, ids=str)
def test_a_graph_computes_what_pytorch_does(dense: Dense, case: Case, tmp_path) -> None:
    """The graph of a pruned output agrees with PyTorch, with a shape that no stock class has where there are such."""
    settings = GraphSettings(**WAYS.get(case.model_type, {}))
    methods = {space: "logit" if space in case.family.logits else "none" for space in case.values}
    if case.model_type == PAIRED:
        methods["rotary"] = "factors"
    dense.prune(case, spaces_recipe(case, methods), tmp_path / "model")
    with trace_as_commands_do():
        GraphWriter(Checkpoint.open(tmp_path / "model"), tmp_path / "graph", settings).write()
    assert_stated(tmp_path / "graph", settings)
    graph, module = Graph(tmp_path / "graph"), in_pytorch(tmp_path / "model")
    if case.family.modality == "text":
        assert_reads(graph, module, Text.random(3, 9, side="left" if graph.cached else "right"), EXACT)
        if graph.cached:
            assert_reads_in_chunks(graph, module, Text.random(2, 9), (6, 1, 2), EXACT)
        return
    (pixels,) = case.samples(3).batch(slice(3)).values()
    feed = {"pixel_values": np.ascontiguousarray(pixels.numpy())}
    results = graph(feed)
    with torch.inference_mode():
        for output, theirs in expected_of(module, feed, graph.outputs).items():
            assert_near(output, results[output], theirs, EXACT)
