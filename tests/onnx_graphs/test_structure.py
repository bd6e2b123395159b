"""A graph that is read without its weights."""

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from ckpt_prune.onnx.structure import MAPPED, SMALL, read_structure, refer_to_weights


def make_model() -> onnx.ModelProto:
    large, small = np.ones((40, 30), np.float32), np.array([2, 15, 40])
    typed = helper.make_tensor("typed", TensorProto.FLOAT, [600], np.zeros(600, np.float32))  # not as bytes
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["read", "large"], ["made"]),
            helper.make_node("Reshape", ["made", "small"], ["end"]),
        ],
        "main",
        [helper.make_tensor_value_info("read", TensorProto.FLOAT, ["n", 40])],
        [helper.make_tensor_value_info("end", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(large, "large"), numpy_helper.from_array(small, "small"), typed],
    )
    return helper.make_model(graph, producer_name="ckpt_prune", opset_imports=[helper.make_opsetid("", 20)])


def test_all_but_the_bytes_of_large_weights_is_read(tmp_path):
    model, path = make_model(), tmp_path / "model.onnx"
    onnx.save(model, path)
    structure = read_structure(path)
    large = structure.graph.initializer[0]
    assert large.data_location == TensorProto.EXTERNAL
    assert not large.HasField("raw_data")
    assert structure.ByteSize() < path.stat().st_size - SMALL
    large.ClearField("data_location")
    model.graph.initializer[0].ClearField("raw_data")
    assert structure == model


def test_large_weights_are_said_to_lie_where_they_do(tmp_path):
    model, path = make_model(), tmp_path / "model.onnx"
    large = np.arange(200 * 100, dtype=np.float32).reshape(200, 100)
    model.graph.initializer.append(numpy_helper.from_array(large, "larger"))
    onnx.save(model, path)
    data = refer_to_weights(path)
    assert len(data) < path.stat().st_size - MAPPED
    *others, larger = onnx.ModelProto.FromString(data).graph.initializer
    assert others == list(model.graph.initializer)[:-1]  # too small to be worth a map
    place = {entry.key: entry.value for entry in larger.external_data}
    assert place.pop("location") == "model.onnx"
    offset, length = int(place["offset"]), int(place["length"])
    assert path.read_bytes()[offset : offset + length] == large.tobytes()
    read = onnx.load_model_from_string(data)
    onnx.load_external_data_for_model(read, str(tmp_path))
    assert np.array_equal(numpy_helper.to_array(read.graph.initializer[-1]), large)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_file_that_was_cut_off_is_refused(kept, tmp_path):
    path = tmp_path / "model.onnx"
    complete = make_model().SerializeToString()
    path.write_bytes(complete[: int(kept * len(complete))])
    for read in (read_structure, lambda path: onnx.ModelProto.FromString(refer_to_weights(path))):
        with pytest.raises((ValueError, DecodeError)):
            read(path)


@pytest.mark.parametrize("damaged", [b"\x3f", b"\x80" * 12, b"\x3a\xff\xff\xff\xff\x0f", b"\x3d\x00"])
def test_what_is_no_graph_is_refused(damaged, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"byte \d"):
        read_structure(path)


def test_an_empty_file_holds_nothing(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    assert read_structure(path) == onnx.ModelProto()
