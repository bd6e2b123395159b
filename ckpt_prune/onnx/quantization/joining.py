"""The graphs of an encoder and its decoder as one, on whose outputs the weights of both are measured."""

from collections.abc import Mapping

import onnx_ir

from ckpt_prune.common.graph_types import GraphStack
from ckpt_prune.onnx.pairs import TARGET
from ckpt_prune.onnx.stacks import BRANCH

Graphs = Mapping[GraphStack | None, onnx_ir.Model]
"""Stack → its graph; a model that is one graph has it under None."""
_SHARED = {"encoder_hidden_states": "last_hidden_state", "encoder_attention_mask": "attention_mask"}
"""Input of a decoder → output or input of its encoder."""


def start_name(stack: GraphStack | None) -> str:
    """Return what names of a stack's weights begin with where both graphs are one."""
    return "" if stack is None else f"{stack}/"


def join_graphs(graphs: Graphs) -> onnx_ir.Model:
    """Return the only graph, or one that computes what an encoder-decoder does as a whole; the others do not change.

    It reads what the model is called with in training, `decoder_input_ids` among it, and the decoder's cache, and
    returns `logits`. A weight that both graphs have is in it twice, as each file has its own.
    """
    if None in graphs:
        return graphs[None]
    joined, decoder = (_start_names(graphs[stack].clone(), stack) for stack in ("encoder", "decoder"))
    ports = {str(value.name): value for value in (*joined.graph.inputs, *joined.graph.outputs)}
    inputs, outputs = list(decoder.graph.inputs), [each for each in decoder.graph.outputs if each.name == "logits"]
    nodes, weights = list(decoder.graph), list(decoder.graph.initializers.values())
    for part in (decoder.graph.inputs, decoder.graph.outputs, decoder.graph.initializers, joined.graph.outputs):
        part.clear()
    decoder.graph.remove(nodes)
    for value in inputs:
        if value.name in _SHARED:
            value.replace_all_uses_with(ports[_SHARED[value.name]])
        elif value.name != BRANCH:
            value.name = TARGET if value.name == "input_ids" else value.name
            joined.graph.inputs.append(value)
    for weight in weights:
        joined.graph.register_initializer(weight)
    joined.graph.extend(nodes)
    joined.graph.outputs.extend(outputs)
    return joined


def _start_names(model: onnx_ir.Model, stack: GraphStack) -> onnx_ir.Model:
    """Let names of all values but inputs and outputs begin with that of the stack."""
    graph, start = model.graph, start_name(stack)
    outputs = {id(value) for value in graph.outputs}
    made = [value for node in graph for value in node.outputs]
    for value in (*list(graph.initializers.values()), *made):
        if id(value) not in outputs and value.name:
            value.name = start + value.name
    for node in graph:
        node.name = start + (node.name or "")
    return model
