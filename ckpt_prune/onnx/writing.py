"""Writing a graph with its weights inside, one weight at a time."""

import itertools
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir

GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
"""Numbers of fields: `graph` of ModelProto, `initializer` of GraphProto, `raw_data` of TensorProto."""


def write_graph(model: onnx_ir.Model, path: Path) -> None:
    """Write what `onnx_ir.save` writes without external data, in the memory of the largest weight.

    protobuf would hold two copies of all weights: one in its message, one in the bytes of that.
    """
    with path.open("wb") as file:
        for part in _parts(model):
            file.write(part if isinstance(part, bytes) else get_bytes(part))


def count_written_bytes(model: onnx_ir.Model) -> int:
    """Return the size of what `write_graph` writes."""
    return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in _parts(model))


def _parts(model: onnx_ir.Model) -> list[bytes | onnx_ir.TensorProtocol]:
    """Return what stands in the file, one after the other."""
    weights = list(model.graph.initializers.values())
    model.graph.initializers.clear()
    try:
        message = onnx_ir.to_proto(model)
    finally:
        for weight in weights:
            model.graph.register_initializer(weight)
    nodes = message.graph.SerializeToString()
    message.ClearField("graph")
    parts = []
    for weight in weights:
        tensor = weight.const_value
        assert tensor is not None
        head = onnx.TensorProto(name=weight.name or "", data_type=int(tensor.dtype), dims=list(tensor.shape.numpy()))
        start = head.SerializeToString() + start_field(RAW_DATA, tensor.nbytes)
        parts.append((start_field(INITIALIZER, len(start) + tensor.nbytes) + start, tensor))
    size = len(nodes) + sum(len(start) + tensor.nbytes for start, tensor in parts)
    return [message.SerializeToString() + start_field(GRAPH, size) + nodes, *itertools.chain.from_iterable(parts)]


def get_bytes(tensor: onnx_ir.TensorProtocol) -> bytes | memoryview:
    """Return the bytes that a tensor is stored as, without a copy of those that lie in memory like that."""
    array = tensor.numpy()
    is_unpacked = array.dtype.itemsize * array.size == tensor.nbytes  # not several elements in a byte
    if is_unpacked and array.flags.c_contiguous and sys.byteorder == "little":
        return array.reshape(-1).view(np.uint8).data
    return tensor.tobytes()


def start_field(number: int, size: int) -> bytes:
    """Return the key of a field of bytes, and their number as a varint."""
    prefix = bytearray([number << 3 | 2])
    while size > 127:
        prefix.append(size & 127 | 128)
        size >>= 7
    return bytes([*prefix, size])
