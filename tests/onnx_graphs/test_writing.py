"""A graph that is written one weight at a time is the one that protobuf writes."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir

from ckpt_prune.onnx.writing import get_bytes, write_graph


def test_protobuf_reads_the_same_message(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.standard_normal((40, 70)).astype(np.float32),
        "transposed": rng.standard_normal((30, 9)).astype(np.float16).T,
        "numbers": np.arange(3),
        "half": rng.standard_normal(200).astype(ml_dtypes.bfloat16),
        "scalar": np.array(True),
        "none": np.zeros((0, 4), np.float32),
    }
    weights = [
        onnx_ir.Value(name=name, const_value=onnx_ir.tensor(array, name=name), shape=onnx_ir.Shape(array.shape),
                      type=onnx_ir.TensorType(onnx_ir.DataType.from_numpy(array.dtype)))
        for name, array in arrays.items()
    ]  # fmt: skip
    read = onnx_ir.Value(name="read", shape=onnx_ir.Shape(["n", 40]), type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT))
    node = onnx_ir.node("MatMul", [read, weights[0]])
    graph = onnx_ir.Graph([read], node.outputs, nodes=[node], initializers=weights, opset_imports={"": 20}, name="main")
    model = onnx_ir.Model(graph, ir_version=10, producer_name="ckpt_prune")
    write_graph(model, tmp_path / "model.onnx")
    expected = onnx_ir.to_proto(model)
    assert len(expected.graph.initializer) == len(arrays)
    loaded = onnx.load(tmp_path / "model.onnx")
    # What it writes in the field of one type, this has as bytes; both mean the same.
    for ours, theirs in zip(loaded.graph.initializer, expected.graph.initializer, strict=True):
        assert (ours.name, ours.data_type, ours.dims) == (theirs.name, theirs.data_type, theirs.dims)
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(ours), onnx.numpy_helper.to_array(theirs))
    for proto in (loaded, expected):
        proto.graph.ClearField("initializer")
        proto.graph.ClearField("value_info")  # types of weights, which stand in the weights too
    assert loaded == expected


def test_bytes_are_those_that_are_stored():
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = [matrix, matrix.T, np.array(1.5), np.zeros((0, 2)), np.arange(5).astype(ml_dtypes.bfloat16)]
    tensors = [onnx_ir.tensor(array) for array in arrays]
    tensors.append(onnx_ir.tensor(np.arange(6).astype(ml_dtypes.uint4)))  # two to a byte
    for tensor in tensors:
        assert bytes(get_bytes(tensor)) == tensor.tobytes()
    assert len(get_bytes(tensors[-1])) == 3
