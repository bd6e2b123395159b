"""Opening a graph and calling it like a model: what is left out is filled in as the model itself would."""

import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from ckpt_prune.common.errors import UserError
from ckpt_prune.onnx.session import OnnxModel, complete_inputs, open_session
from tests.graphs import Exported
from tests.refusals import refusal

from .exports import Text, in_pytorch, make_exports, pixels


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Exported:
    return make_exports(tmp_path_factory)


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


@torch.inference_mode()
def test_called_like_the_model_with_a_cache_left_out(exported):
    model, folder = exported("llama-gqa-tied")
    graph, module = OnnxModel(folder), in_pytorch(model)
    assert (graph.cached, graph.device, graph.dtype) == (True, torch.device("cpu"), torch.float32)
    assert graph.eval() is graph
    assert graph.config.model_type == "llama"
    text = Text.random(2, 7, side="left")
    ids, mask = torch.from_numpy(text.ids), torch.from_numpy(text.mask)
    assert near(graph(input_ids=ids).logits, module(input_ids=ids).logits)
    result = graph(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)
    expected = module(input_ids=ids, attention_mask=mask, position_ids=torch.from_numpy(text.positions)).logits
    assert near(result.logits[mask == 1], expected[mask == 1])
    assert list(result) == list(graph.outputs)
    assert result["present.1.key"].shape == (2, 2, 7, 4)


@torch.inference_mode()
def test_called_like_an_encoder_and_like_a_model_of_images(exported):
    model, folder = exported("bert-mlm")
    graph, ids = OnnxModel(folder), torch.from_numpy(Text.random(2, 7).ids)
    assert not graph.cached
    assert graph.empty_cache(3) == {}
    assert near(graph(input_ids=ids).logits, in_pytorch(model)(input_ids=ids).logits)
    kinds = (torch.arange(7)[None] > 3).long().repeat(2, 1)
    expected = in_pytorch(model)(input_ids=ids, token_type_ids=kinds).logits
    assert near(graph(input_ids=ids, token_type_ids=kinds).logits, expected)
    assert not near(graph(input_ids=ids).logits, expected)
    model, folder = exported("dinov2-model")
    images = torch.from_numpy(pixels(3))
    result = OnnxModel(folder)(pixel_values=images)
    assert near(result.last_hidden_state, in_pytorch(model)(pixel_values=images).last_hidden_state)


def test_half_precision_goes_in_and_out(exported):
    graph = OnnxModel(exported("opt", dtype="fp16")[1], "model_fp16.onnx")
    assert graph.dtype == torch.float16
    assert {cache.dtype for cache in graph.empty_cache(2).values()} == {torch.float16}
    assert graph(input_ids=torch.tensor([[3, 4]])).logits.dtype == torch.float16


def test_inputs_that_are_left_out_are_filled_in():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.tensor([[7, 8], [9, 6]])
    completed = complete_inputs({"input_ids": ids, "attention_mask": mask})
    assert completed["position_ids"].tolist() == [[1, 2], [3, 4]]
    assert completed["token_type_ids"].tolist() == [[0, 0], [0, 0]]
    assert completed["attention_mask"] is mask
    assert completed["input_ids"] is ids
    alone = complete_inputs({"input_ids": ids})
    assert alone["attention_mask"].tolist() == [[1, 1], [1, 1]]
    assert alone["position_ids"].tolist() == [[0, 1], [0, 1]]
    positions = torch.tensor([[5, 6], [5, 6]])
    assert complete_inputs({"input_ids": ids, "position_ids": positions})["position_ids"] is positions
    # Padding before a text has the first position, not one before it.
    padded = complete_inputs({"input_ids": torch.zeros_like(mask), "attention_mask": mask})
    assert padded["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_without_cuda_the_cpu_is_used_and_a_line_says_so(exported, capfd):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    session = open_session(exported("dinov2-model")[1] / "model.onnx", provider="cuda")
    assert (session.provider, session.inner.get_providers()) == ("cpu", ["CPUExecutionProvider"])
    assert session.note == (
        "CUDA was asked for and onnxruntime cannot load it here (no GPU, or not the CUDA libraries it was built for): "
        "it runs on the CPU"
    )
    # That one line says it; onnxruntime's own are held back.
    assert capfd.readouterr() == ("", "")
    assert open_session(exported("dinov2-model")[1] / "model.onnx").note is None


def test_as_many_threads_as_torch_uses(exported, monkeypatch):
    seen = []
    original = onnxruntime.InferenceSession

    def watch_options(path, options, **more):
        seen.append(options.intra_op_num_threads)
        return original(path, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", watch_options)
    path = exported("dinov2-model")[1] / "model.onnx"
    open_session(path)
    open_session(path, threads=2)
    assert seen == [torch.get_num_threads(), 2]


def test_nothing_is_reported_to_the_maker_of_onnxruntime(tmp_path: Path) -> None:
    """It kept an identifier and a data base of events in ~/.cache, and sent them."""
    ports = [helper.make_tensor_value_info(name, TensorProto.INT64, ["length"]) for name in ("input_ids", "y")]
    nodes = [helper.make_node("Identity", ["input_ids"], ["y"])]
    graph, path = helper.make_graph(nodes, "graph", ports[:1], ports[1:]), tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    environment = {
        key: value for key, value in os.environ.items() if key not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }
    code = "import sys, ckpt_prune, onnxruntime as o; o.InferenceSession(sys.argv[1], providers=sys.argv[2:])"
    subprocess.run(
        [sys.executable, "-c", code, path, "CPUExecutionProvider"],
        env=environment | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")},
        check=True,
        capture_output=True,
    )
    assert not [*(tmp_path / "home").rglob("*"), *(tmp_path / "temporary").rglob("*")]


def test_a_closed_graph_holds_nothing(exported):
    graph = OnnxModel(exported("llama-gqa-tied")[1])
    session = weakref.ref(graph.session.inner)
    outputs = graph.run(complete_inputs({"input_ids": torch.tensor([[3, 4]])}) | graph.empty_cache(1))
    assert session() is not None
    graph.close()
    assert session() is None
    assert outputs["logits"].isfinite().all()  # they stay


@pytest.mark.parametrize("content", [b"", b"no graph", b"\x08\x0a" * 40])
def test_a_file_that_is_no_graph_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "model.onnx").write_bytes(content)
    message = refusal(open_session, tmp_path / "model.onnx")
    assert message.startswith(f"{tmp_path / 'model.onnx'}: onnxruntime cannot load it: ")


def test_inputs_that_the_graph_cannot_take_are_refused(exported):
    graph = OnnxModel(exported("llama-gqa-tied")[1])
    feed = complete_inputs({"input_ids": torch.tensor([[99]])}) | graph.empty_cache(1)
    assert refusal(graph.run, feed).startswith(
        "onnxruntime cannot run the graph on attention_mask [1, 1], position_ids [1, 1], input_ids [1, 1], "
    )
    image = OnnxModel(exported("dinov2-model")[1])
    with pytest.raises(UserError, match=r"^onnxruntime cannot run the graph on pixel_values \[1, 3, 8, 8\]: "):
        image.run({"pixel_values": torch.zeros(1, 3, 8, 8)})


def test_outputs_are_those_of_the_graph_in_its_order(exported):
    folder = exported("dinov2-model")[1]
    names = [value.name for value in onnx.load(folder / "model.onnx").graph.output]
    graph = OnnxModel(folder)
    outputs = graph.run({"input_ids": torch.tensor([[3, 4]]), "pixel_values": torch.from_numpy(pixels(1))})
    assert list(outputs) == names == list(graph.outputs)
    assert np.isfinite(outputs[names[0]].numpy()).all()
