"""Writing blocks into a graph: MatMulNBits in the place of MatMul, GatherBlockQuantized in that of Gather."""

import numpy as np
import onnx_ir

from ckpt_prune.onnx.quantization.blocks import Blocks
from ckpt_prune.onnx.quantization.weights import Weight, replace_node

DOMAIN = "com.microsoft"
"""onnxruntime's own operators."""


def store_in_blocks(graph: onnx_ir.Graph, weight: Weight, blocks: Blocks, accuracy: int) -> None:
    """Put blocks in the place of a weight, wherever it is used; a tied head and its embedding share them.

    Args:
        graph: that it is of.
        weight: one of its weights.
        blocks: of it.
        accuracy: MatMulNBits' accuracy_level: 0 computes in the graph's own type, 4 rounds inputs to int8.
    """
    packed = _added(graph, f"{weight.name}_Q{blocks.grid.bits}", blocks.packed)
    values = [packed, _added(graph, f"{weight.name}_scales", blocks.scales)]
    if blocks.zeros is not None:
        values.append(_added(graph, f"{weight.name}_zero_points", blocks.zeros))
    rows, columns = weight.shape
    about = {"bits": blocks.grid.bits, "block_size": blocks.grid.block}
    for node in weight.products:
        attributes = about | {"K": rows, "N": columns} | ({"accuracy_level": accuracy} if accuracy else {})
        new = onnx_ir.node("MatMulNBits", [node.inputs[0], *values], attributes, domain=DOMAIN, name=node.name)
        replace_node(graph, node, [new])
    for node in weight.lookups:
        _look_up(graph, node, values, about, rows, blocks)
    for node in weight.turns:
        graph.remove(node, safe=True)
    del graph.initializers[weight.name]


def _look_up(
    graph: onnx_ir.Graph,
    node: onnx_ir.Node,
    values: list[onnx_ir.Value],
    about: dict[str, int],
    width: int,
    blocks: Blocks,
) -> None:
    """Rows of a table: the same bytes without the axis of blocks, and without the padding of the last."""
    packed, *rest = values
    flat = _added(graph, f"{packed.name}_shape", np.array([len(blocks.packed), -1]))
    new = [onnx_ir.node("Reshape", [packed, flat], name=f"{node.name}_rows")]
    attributes = about | {"gather_axis": 0, "quantize_axis": 1}
    inputs = [new[0].outputs[0], node.inputs[1], *rest]
    new.append(onnx_ir.node("GatherBlockQuantized", inputs, attributes, domain=DOMAIN, name=node.name))
    if width % blocks.grid.block:
        bounds = [
            _added(graph, f"{packed.name}_{what}", np.array([value]))
            for what, value in (("start", 0), ("end", width), ("axis", -1))
        ]
        new.append(onnx_ir.node("Slice", [new[-1].outputs[0], *bounds], name=f"{node.name}_unpadded"))
    replace_node(graph, node, new)


def _added(graph: onnx_ir.Graph, name: str, array: np.ndarray) -> onnx_ir.Value:
    """A new initializer, or the one of this name where several lookups take the same."""
    if name in graph.initializers:
        return graph.initializers[name]
    value = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(array, name=name))
    value.shape = onnx_ir.Shape(array.shape)
    value.type = onnx_ir.TensorType(onnx_ir.DataType.from_numpy(array.dtype))
    graph.register_initializer(value)
    return value
