"""Readings of weights by a block of a graph: a weight as it is, transposed, or what nodes make of weights alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from ckpt_prune.onnx.block_kinds import NotAlikeError, name_tensors


@dataclass(frozen=True)
class _Source:
    """Names of weights, and how a graph reads them: the first as it is or transposed, or what a program computes."""

    weights: list[str]
    transposed: bool = False
    program: onnx.ModelProto | None = None


class Readings:
    """The values that a block's other nodes read of its weights; made before the graph is optimized.

    Args:
        nodes: of the block, in the graph's order.
        weights: initializers of the block, by their names in it.
        path: name of the list of blocks in the model.

    Attributes:
        values: while they are hidden, inputs of the graph.
    """

    def __init__(
        self, graph: onnx_ir.Graph, nodes: Sequence[onnx_ir.Node], weights: Mapping[str, onnx_ir.Value], path: str
    ) -> None:
        self._graph, self._path = graph, path
        self._names = {value: name for name, value in weights.items()}
        self._made: dict[onnx_ir.Value, onnx_ir.Node] = {}
        """Values made of weights and constants alone → the node that makes them."""
        self._constant: dict[onnx_ir.Value, bool] = {}
        for node in nodes:
            inputs = [value for value in node.inputs if value is not None]
            of_weights = [value in self._names or value in self._made for value in inputs]
            if any(of_weights) and all(
                is_weight or self._is_constant(value) for value, is_weight in zip(inputs, of_weights, strict=True)
            ):
                self._made |= dict.fromkeys(node.outputs, node)
        computed = set(self._made.values())
        self._read = [
            value
            for value in (*self._names, *self._made)
            if any(use.node not in computed for use in value.uses()) and not value.is_graph_output()
        ]
        self._sources = [self._find_source(value) for value in self._read]
        self.values: list[onnx_ir.Value] = []

    def hide(self, block: nn.Module, index: int) -> None:
        """Make inputs of the graph of what is read, so that an optimizer cannot see what it holds."""
        for value, tensor in zip(self._read, self._evaluate(block, index), strict=True):
            hidden = _make_value(tensor)
            hidden.const_value = None
            for use in [use for use in value.uses() if use.node not in set(self._made.values())]:
                use.node.replace_input_with(use.idx, hidden)
            self.values.append(hidden)
        for value in self._names:
            if not value.uses():
                self._graph.initializers.pop(value.name or "")
        self._graph.inputs.extend(self.values)

    def restore(self, block: nn.Module, index: int) -> None:
        """Make initializers of the inputs again."""
        for value, tensor in zip(self.values, self._evaluate(block, index), strict=True):
            self._graph.inputs.remove(value)
            value.const_value = tensor
            self._graph.register_initializer(value)

    def register(self, block: nn.Module, index: int) -> tuple[list[onnx_ir.Value], bool]:
        """Initializers with what another block reads, and whether all have the shapes of this one's."""
        values = [_make_value(tensor) for tensor in self._evaluate(block, index)]
        for value in values:
            self._graph.register_initializer(value)
        return values, all(earlier.shape == value.shape for earlier, value in zip(self.values, values, strict=True))

    def _is_constant(self, value: onnx_ir.Value) -> bool:
        if value not in self._constant:
            node = value.producer()
            self._constant[value] = node is not None and all(
                each is None or self._is_constant(each) for each in node.inputs
            )
        return self._constant[value]

    def _find_source(self, value: onnx_ir.Value) -> "_Source":
        """Return how to work out a value, in a form that the optimizer does not change."""
        node = self._made.get(value)
        if node is None:
            return _Source([self._names[value]])
        first = node.inputs[0]
        if node.op_type == "Transpose" and first in self._names and first.shape is not None and len(first.shape) == 2:
            return _Source([self._names[first]], transposed=True)
        nodes: dict[onnx_ir.Node, None] = {}
        weights: dict[onnx_ir.Value, None] = {}

        def add(needed: onnx_ir.Value | None) -> None:
            if needed in self._names:
                weights[needed] = None
            elif needed is not None and (producer := needed.producer()) is not None and producer not in nodes:
                for each in producer.inputs:
                    add(each)
                nodes[producer] = None

        add(value)
        graph = onnx.helper.make_graph(
            [onnx_ir.serde.serialize_node(each) for each in nodes],
            "weights",
            [onnx.ValueInfoProto(name=each.name) for each in weights],
            [onnx.ValueInfoProto(name=value.name)],
        )
        opsets = [onnx.helper.make_opsetid(*each) for each in self._graph.opset_imports.items()]
        model = onnx.helper.make_model(graph, opset_imports=opsets)
        return _Source([self._names[each] for each in weights], program=model)

    def _evaluate(self, block: nn.Module, index: int) -> list[onnx_ir.TensorProtocol]:
        weights = {name: tensor.detach() for name, tensor in name_tensors(block)}
        missing = [name for name in self._names.values() if name not in weights]
        if missing:
            raise NotAlikeError(f"block {index} has no {missing[0]}")
        tensors: list[onnx_ir.TensorProtocol] = []
        for value, source in zip(self._read, self._sources, strict=True):
            name = f"{self._path}.{index}.{source.weights[0]}"
            if source.program is not None:
                inputs = [port.name for port in source.program.graph.input]
                feed = {port: weights[each].numpy() for port, each in zip(inputs, source.weights, strict=True)}
                (array,) = ReferenceEvaluator(source.program).run(None, feed)
                tensors.append(onnx_ir.tensor(array, name=f"{value.name}.{index}"))
            elif source.transposed:
                tensors.append(TorchTensor(weights[source.weights[0]].T, f"{name}.T"))
            else:
                tensors.append(TorchTensor(weights[source.weights[0]], name))
        return tensors


def _make_value(tensor: onnx_ir.TensorProtocol) -> onnx_ir.Value:
    return onnx_ir.Value(
        name=tensor.name,
        shape=onnx_ir.Shape(tensor.shape.numpy()),
        type=onnx_ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
