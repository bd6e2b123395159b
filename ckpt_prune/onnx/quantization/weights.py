"""The weights of a graph that can be stored in fewer bits, and how they are written into it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from ckpt_prune.onnx.quantization.blocks import Blocks

Array = NDArray[Any]

FEWEST = 256
"""Elements of the smallest weight that is worth it: scales and zeros take room too."""
DOMAIN = "com.microsoft"
"""onnxruntime's own operators."""
_EXPERT = "expert"
"""Marks the matrix of an expert."""
_REACH = 4
"""Operators behind a product that tell its role: those of keys, values and queries differ within so many."""


@dataclass(frozen=True, eq=False)
class GraphWeight:
    """A matrix (K, N): K inputs, N outputs, of products and lookups.

    A head that is tied to the embedding is one weight with both uses: what is decided of it holds for both.
    """

    value: onnx_ir.Value
    """The initializer: (K, N), or (N, K) of a table."""
    is_table: bool
    """Whether it is stored (N, K): rows are taken from it, or its transpose is multiplied with."""
    products: tuple[onnx_ir.Node, ...]
    """MatMuls by it."""
    lookups: tuple[onnx_ir.Node, ...]
    """Gathers of its rows."""
    transposes: tuple[onnx_ir.Node, ...]
    """Between it and products."""

    @property
    def name(self) -> str:
        return self.value.name or ""

    @property
    def is_of_expert(self) -> bool:
        """Whether it is one expert's: its inputs are those of the tokens that a router sends there."""
        return _EXPERT in self.value.meta

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        rows, columns = (int(size) for size in self._tensor.shape.numpy())
        return (columns, rows) if self.is_table else (rows, columns)

    @property
    def dtype(self) -> Any:
        return self._tensor.dtype.numpy()

    @property
    def role(self) -> tuple[object, ...]:
        """Its use, as far as a graph says it: the operators that come after it.

        In a model of blocks each block has one weight of a role, or a few. Widths do not count: blocks may differ.
        """
        users, after = [*self.products, *self.lookups], []
        for _ in range(_REACH):
            users = [use.node for user in users for value in user.outputs for use in value.uses()]
            after.append(tuple(sorted({user.op_type for user in users})))
        return self.is_table, *after

    def to_matrix(self) -> Array:
        """Its values, (K, N), in the graph's type."""
        return self.turn(self._tensor.numpy())

    def turn(self, matrix: Array) -> Array:
        """Return a matrix (K, N) the way round the initializer is, or back."""
        return np.ascontiguousarray(matrix.T if self.is_table else matrix)

    @property
    def _tensor(self) -> Any:
        assert self.value.const_value is not None
        return self.value.const_value


def find_weights(graph: onnx_ir.Graph) -> list[GraphWeight]:
    """Return all of them, in the graph's order; those that anything else is done with stay as they are."""
    weights = (_read_weight(value) for value in graph.initializers.values())
    return [weight for weight in weights if weight is not None]


def _read_weight(value: onnx_ir.Value) -> GraphWeight | None:
    tensor = value.const_value
    if tensor is None or len(tensor.shape) != 2 or not tensor.dtype.is_floating_point() or tensor.size < FEWEST:
        return None
    products: list[onnx_ir.Node] = []
    lookups: list[onnx_ir.Node] = []
    transposes: list[onnx_ir.Node] = []
    direct = False
    for use in value.uses():
        node = use.node
        if _is_product(use):
            products.append(node)
            direct = True
        elif node.op_type == "Gather" and use.idx == 0 and node.attributes.get_int("axis", 0) == 0:
            lookups.append(node)
        elif node.op_type == "Transpose" and all(map(_is_product, node.outputs[0].uses())):
            transposes.append(node)
            products += [each.node for each in node.outputs[0].uses()]
        else:
            return None
    is_table = bool(lookups or transposes)
    if (is_table and direct) or not (products or lookups):
        return None
    return GraphWeight(value, is_table, tuple(products), tuple(lookups), tuple(transposes))


def _is_product(use: Any) -> bool:
    return use.node.op_type == "MatMul" and use.idx == 1 and not use.node.domain


def copy_with_products(model: onnx_ir.Model) -> onnx_ir.Model:
    """Return a copy whose products by weights are MatMuls by matrices, which can be stored in few bits.

    A Gemm becomes MatMul and Add, and a tensor of all experts of a block one matrix for each of them.
    """
    copy = model.clone()
    for value in list(copy.graph.initializers.values()):
        _split_experts(copy.graph, value)
    for node in list(copy.graph):
        weight = node.inputs[1] if node.op_type == "Gemm" and not node.domain else None
        attributes = node.attributes
        if (
            weight is not None
            and weight.is_initializer()
            and attributes.get_int("transA", 0) == 0
            and attributes.get_float("alpha", 1.0) == attributes.get_float("beta", 1.0) == 1.0
        ):
            _split_gemm(copy.graph, node)
    return copy


def _split_experts(graph: onnx_ir.Graph, value: onnx_ir.Value) -> None:
    """Put matrices in the place of a tensor (experts, K, N) that is only taken apart: split, squeezed, multiplied with.

    Each keeps the memory of its part of the tensor.
    """
    tensor = value.const_value
    if tensor is None or len(tensor.shape) != 3 or not tensor.dtype.is_floating_point():
        return
    splits = [use.node for use in value.uses()]
    parts = [part for node in splits for part in node.outputs]
    squeezes = [use.node for part in parts for use in part.uses()]
    if not splits or any(
        node.op_type != "Split" or node.attributes.get_int("axis", 0) or len(node.outputs) != tensor.shape[0]
        for node in splits
    ):
        return
    if any(node.op_type != "Squeeze" for node in squeezes):
        return
    array = tensor.numpy()
    for node in splits:
        for number, part in enumerate(node.outputs):
            matrix = _add_initializer(graph, f"{value.name}.{number}", array[number])
            matrix.meta[_EXPERT] = True
            for use in list(part.uses()):
                use.node.outputs[0].replace_all_uses_with(matrix)
    _remove(graph, squeezes)
    _remove(graph, splits)
    del graph.initializers[value.name or ""]


def _split_gemm(graph: onnx_ir.Graph, node: onnx_ir.Node) -> None:
    x, weight, *rest = node.inputs
    nodes: list[onnx_ir.Node] = []
    if node.attributes.get_int("transB", 0):
        nodes.append(onnx_ir.node("Transpose", [weight], {"perm": [1, 0]}))
        weight = nodes[-1].outputs[0]
    nodes.append(onnx_ir.node("MatMul", [x, weight], name=node.name))
    if rest and rest[0] is not None:
        nodes.append(onnx_ir.node("Add", [nodes[-1].outputs[0], rest[0]]))
    _replace_node(graph, node, nodes)


def _replace_node(graph: onnx_ir.Graph, node: onnx_ir.Node, nodes: list[onnx_ir.Node]) -> None:
    """Put nodes in the place of one; the last computes its output."""
    old, new = node.outputs[0], nodes[-1].outputs[0]
    name, new.shape, new.type = old.name, old.shape, old.type
    for number, each in enumerate(nodes[:-1]):
        each.outputs[0].name = f"{name}.{number}"
    graph.insert_before(node, nodes)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    new.name = name


def store_in_blocks(graph: onnx_ir.Graph, weight: GraphWeight, blocks: Blocks, accuracy: int) -> None:
    """Put blocks in the place of a weight, wherever it is used; a tied head and its embedding share them.

    MatMulNBits takes the place of MatMul, GatherBlockQuantized that of Gather.

    Args:
        accuracy: MatMulNBits' accuracy_level: 0 computes in the graph's own type, 4 rounds inputs to int8.
    """
    packed = _add_initializer(graph, f"{weight.name}_Q{blocks.grid.bits}", blocks.packed)
    values = [packed, _add_initializer(graph, f"{weight.name}_scales", blocks.scales.astype(weight.dtype))]
    if blocks.zeros is not None:
        values.append(_add_initializer(graph, f"{weight.name}_zero_points", blocks.zeros))
    rows, columns = weight.shape
    grid = {"bits": blocks.grid.bits, "block_size": blocks.grid.block}
    for node in weight.products:
        attributes = grid | {"K": rows, "N": columns} | ({"accuracy_level": accuracy} if accuracy else {})
        new = onnx_ir.node("MatMulNBits", [node.inputs[0], *values], attributes, domain=DOMAIN, name=node.name)
        _replace_node(graph, node, [new])
    for node in weight.lookups:
        _store_lookup(graph, node, values, grid, rows, blocks)
    _remove(graph, weight.transposes)
    del graph.initializers[weight.name]


def _store_lookup(
    graph: onnx_ir.Graph,
    node: onnx_ir.Node,
    values: Sequence[onnx_ir.Value],
    grid: dict[str, int],
    width: int,
    blocks: Blocks,
) -> None:
    """Rows of a table: the same bytes without the axis of blocks, and without the padding of the last."""
    packed, *rest = values
    flat = _add_initializer(graph, f"{packed.name}_shape", np.array([len(blocks.packed), -1]))
    nodes = [onnx_ir.node("Reshape", [packed, flat], name=f"{node.name}_rows")]
    attributes = grid | {"gather_axis": 0, "quantize_axis": 1}
    inputs = [nodes[0].outputs[0], node.inputs[1], *rest]
    nodes.append(onnx_ir.node("GatherBlockQuantized", inputs, attributes, domain=DOMAIN, name=node.name))
    if width % blocks.grid.block:
        bounds = [
            _add_initializer(graph, f"{packed.name}_{what}", np.array([value]))
            for what, value in (("start", 0), ("end", width), ("axis", -1))
        ]
        nodes.append(onnx_ir.node("Slice", [nodes[-1].outputs[0], *bounds], name=f"{node.name}_unpadded"))
    _replace_node(graph, node, nodes)


def store_untransposed(graph: onnx_ir.Graph, weight: GraphWeight) -> None:
    """Store a table that is only multiplied with the way it is multiplied with: int8 quantizers look no further."""
    if not weight.transposes:
        return
    value = _add_initializer(graph, f"{weight.name}.T", weight.to_matrix())
    for node in weight.transposes:
        node.outputs[0].replace_all_uses_with(value)
    _remove(graph, weight.transposes)
    del graph.initializers[weight.name]


def _remove(graph: onnx_ir.Graph, nodes: Sequence[onnx_ir.Node]) -> None:
    for node in nodes:
        graph.remove(node, safe=True)


def _add_initializer(graph: onnx_ir.Graph, name: str, array: Array) -> onnx_ir.Value:
    """Return a new initializer, or the one of this name if several lookups take the same."""
    if name in graph.initializers:
        return graph.initializers[name]
    value = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(array, name=name))
    value.shape = onnx_ir.Shape(array.shape)
    value.type = onnx_ir.TensorType(onnx_ir.DataType.from_numpy(array.dtype))
    graph.register_initializer(value)
    return value
