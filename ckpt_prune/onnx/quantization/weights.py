"""The weights of a graph that can be stored in fewer bits: matrices that something is multiplied with, and tables."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray

Array = NDArray[Any]

FEWEST = 256
"""Elements of the smallest weight that is worth it: scales and zeros take room too."""
_REACH = 4
"""Operators behind a product that tell its role: those of keys, values and queries differ within so many."""


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix (K, N): K inputs, N outputs.

    A head that is tied to the embedding is one weight with both uses: what is decided of it holds for both.
    """

    value: onnx_ir.Value
    """The initializer: (K, N), or (N, K) of a table."""
    table: bool
    """Whether it is stored (N, K): rows are taken from it, or its transpose is multiplied with."""
    products: tuple[onnx_ir.Node, ...]
    """MatMuls by it."""
    lookups: tuple[onnx_ir.Node, ...]
    """Gathers of its rows."""
    turns: tuple[onnx_ir.Node, ...]
    """Transposes between it and products."""

    @property
    def name(self) -> str:
        """Of the initializer."""
        return self.value.name or ""

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        assert self.value.const_value is not None
        rows, columns = (int(size) for size in self.value.const_value.shape.numpy())
        return (columns, rows) if self.table else (rows, columns)

    @property
    def role(self) -> tuple[object, ...]:
        """What it is used for, as far as a graph says it: what operators come after it.

        In a model of blocks each block has one weight of a role, or a few. Widths do not count: blocks may differ.
        """
        users, after = [*self.products, *self.lookups], []
        for _ in range(_REACH):
            users = [use.node for user in users for value in user.outputs for use in value.uses()]
            after.append(tuple(sorted({user.op_type for user in users})))
        return self.table, *after

    def matrix(self) -> Array:
        """Its values, (K, N), in the graph's type."""
        assert self.value.const_value is not None
        stored = self.value.const_value.numpy()
        return np.ascontiguousarray(stored.T if self.table else stored)

    def stored(self, matrix: Array) -> Array:
        """A matrix (K, N) the way round the initializer is."""
        return np.ascontiguousarray(matrix.T if self.table else matrix)


def weights_of(graph: onnx_ir.Graph) -> list[Weight]:
    """All of them, in the graph's order; those that anything else is done with stay as they are."""
    found = (_weight(value) for value in graph.initializers.values())
    return [weight for weight in found if weight is not None]


def _weight(value: onnx_ir.Value) -> Weight | None:
    tensor = value.const_value
    if tensor is None or len(tensor.shape) != 2 or not tensor.dtype.is_floating_point() or tensor.size < FEWEST:
        return None
    products: list[onnx_ir.Node] = []
    lookups: list[onnx_ir.Node] = []
    turns: list[onnx_ir.Node] = []
    direct = False
    for node, index in value.uses():
        if node.op_type == "MatMul" and index == 1 and not node.domain:
            products.append(node)
            direct = True
        elif node.op_type == "Gather" and index == 0 and node.attributes.get_int("axis", 0) == 0:
            lookups.append(node)
        elif node.op_type == "Transpose" and all(_multiplies(use) for use in node.outputs[0].uses()):
            turns.append(node)
            products += [use.node for use in node.outputs[0].uses()]
        else:
            return None
    table = bool(lookups or turns)
    if (table and direct) or not (products or lookups):
        return None
    return Weight(value, table, tuple(products), tuple(lookups), tuple(turns))


def _multiplies(use: Any) -> bool:
    return use.node.op_type == "MatMul" and use.idx == 1 and not use.node.domain


def split_gemms(graph: onnx_ir.Graph) -> None:
    """Write each Gemm by a weight as MatMul and Add, which is what can be stored in blocks."""
    for node in list(graph):
        if node.op_type == "Gemm" and not node.domain and _is_plain(node):
            _split(graph, node)


def _is_plain(node: onnx_ir.Node) -> bool:
    attributes = node.attributes
    weight = node.inputs[1]
    return (
        weight is not None
        and weight.is_initializer()
        and attributes.get_int("transA", 0) == 0
        and attributes.get_float("alpha", 1.0) == attributes.get_float("beta", 1.0) == 1.0
    )


def _split(graph: onnx_ir.Graph, node: onnx_ir.Node) -> None:
    x, weight, *rest = node.inputs
    new: list[onnx_ir.Node] = []
    if node.attributes.get_int("transB", 0):
        new.append(onnx_ir.node("Transpose", [weight], {"perm": [1, 0]}))
        weight = new[-1].outputs[0]
    new.append(onnx_ir.node("MatMul", [x, weight], name=node.name))
    if rest and rest[0] is not None:
        new.append(onnx_ir.node("Add", [new[-1].outputs[0], rest[0]]))
    replace_node(graph, node, new)


def replace_node(graph: onnx_ir.Graph, node: onnx_ir.Node, new: list[onnx_ir.Node]) -> None:
    """Put nodes in the place of one; the last makes what it made."""
    old, made = node.outputs[0], new[-1].outputs[0]
    name, made.shape, made.type = old.name, old.shape, old.type
    for number, each in enumerate(new[:-1]):
        each.outputs[0].name = f"{name}.{number}"
    graph.insert_before(node, new)
    old.replace_all_uses_with(made, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    made.name = name
