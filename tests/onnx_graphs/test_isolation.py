"""Graphs in processes of their own, which may not take more time or memory than they need."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from ckpt_prune.api.validate import validate
from ckpt_prune.api.verify import verify
from ckpt_prune.common.errors import UserError
from ckpt_prune.onnx import isolation
from ckpt_prune.onnx.isolation import isolate_sessions
from ckpt_prune.onnx.session import OnnxModel, open_session
from tests.forked import posix, run_forked, wait_gone
from tests.graphs import Exported

pytestmark = posix
IDS = {"input_ids": np.arange(6).reshape(2, 3)}
WHATEVER = helper.make_tensor_value_info("y", TensorProto.INT64, None)


def write_graph(folder: Path, *nodes: onnx.NodeProto) -> Path:
    """A graph from `input_ids` to `y`."""
    given = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    graph = helper.make_graph(nodes, "graph", [given], [WHATEVER])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def constant(name: str, kind: int, values: list[int], shape: list[int]) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, shape, values))


def test_nothing_is_reported_to_the_maker_of_onnxruntime(tmp_path: Path) -> None:
    """It kept an identifier and a data base of events in ~/.cache, and sent them."""
    graph = write_graph(tmp_path, helper.make_node("Identity", ["input_ids"], ["y"]))
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    environment = {
        key: value for key, value in os.environ.items() if key not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }
    code = "import sys, ckpt_prune, onnxruntime as o; o.InferenceSession(sys.argv[1], providers=sys.argv[2:])"
    subprocess.run(
        [sys.executable, "-c", code, graph, "CPUExecutionProvider"],
        env=environment | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")},
        check=True,
        capture_output=True,
    )
    assert not [*(tmp_path / "home").rglob("*"), *(tmp_path / "temporary").rglob("*")]


def endless(folder: Path) -> Path:
    def values(*names: str) -> list[onnx.ValueInfoProto]:
        kinds = {"go": TensorProto.BOOL, "again": TensorProto.BOOL, "at": TensorProto.INT64}
        return [
            helper.make_tensor_value_info(n, kinds.get(n, TensorProto.INT64), [] if n in kinds else None) for n in names
        ]

    steps = [helper.make_node("Identity", [a], [b]) for a, b in (("go", "again"), ("x", "same"))]
    body = helper.make_graph(steps, "body", values("at", "go", "x"), values("again", "same"))
    loop = helper.make_node("Loop", ["", "yes", "input_ids"], ["y"], body=body)
    return write_graph(folder, constant("yes", TensorProto.BOOL, [True], []), loop)


def huge(folder: Path) -> Path:
    """16 GiB of zeros, of a file of 300 bytes."""
    return write_graph(
        folder,
        constant("shape", TensorProto.INT64, [2**16, 2**16], [2]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["none"], to=TensorProto.INT64),
        helper.make_node("Add", ["input_ids", "none"], ["y"]),
    )


def test_a_graph_computes_the_same_apart(tmp_path):
    path = write_graph(tmp_path, helper.make_node("Add", ["input_ids", "input_ids"], ["y"]))
    with isolate_sessions():
        other = open_session(path)
        session = open_session(path)
        assert [port.name for port in other.inner.get_inputs()] == ["input_ids"]
        assert other.inner.get_inputs()[0].shape == ["batch", "length"]
        assert (other.inner.run(None, IDS)[0] == 2 * IDS["input_ids"]).all()
        process = other.inner._process
        assert process.poll() is None
        with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
            session.inner.run(None, {"input_ids": np.zeros((1, 1, 1), np.int64)})
        assert (session.inner.run(None, IDS)[0] == 2 * IDS["input_ids"]).all()
    assert process.poll() is not None
    here = open_session(path)
    assert torch.equal(torch.from_numpy(here.inner.run(None, IDS)[0]), torch.from_numpy(2 * IDS["input_ids"]))


def test_a_graph_that_is_closed_has_no_process_any_more(exported: Exported) -> None:
    _, folder = exported("deit-teacher")
    with isolate_sessions():
        graph = OnnxModel(folder, mapped=True)
        process = graph.session.inner._process
        assert graph.run({"pixel_values": torch.zeros(1, 3, 12, 12)})["logits"].isfinite().all()
        assert process.poll() is None
        graph.close()
        assert process.poll() is not None


def test_commands_run_graphs_apart(exported: Exported, tmp_path, monkeypatch):
    """Elsewhere in these tests they do not, which takes a third of a second less each time."""
    monkeypatch.setattr(isolation, "isolate_sessions", isolate_sessions)
    opened, open_one = [], isolation.IsolatedSession.__init__

    def note_folder(self, graph, *options):
        opened.append(graph)
        open_one(self, graph, *options)

    monkeypatch.setattr(isolation.IsolatedSession, "__init__", note_folder)
    model, folder = exported("deit-teacher")
    graph = shutil.copytree(folder, tmp_path / "graph")  # validation writes what it found
    assert verify(graph).passed
    assert len(opened) == 1
    assert validate(graph, against=model, samples=2).passed
    assert len(opened) == 2


def test_a_loop_without_end_is_stopped(tmp_path, monkeypatch):
    path = endless(tmp_path)
    with isolate_sessions():
        inner = open_session(path).inner
        monkeypatch.setattr(isolation, "SECONDS", 0.5)
        with pytest.raises(RuntimeError, match=r"^it did not end within 0.5 s$"):
            inner.run(None, IDS)
        with pytest.raises(RuntimeError):
            inner.run(None, IDS)


def test_a_graph_that_takes_all_memory_is_stopped(tmp_path, capfd):
    path = huge(tmp_path)
    with isolate_sessions(), pytest.raises(RuntimeError, match="Failed to allocate memory"):
        open_session(path).inner.run(None, IDS)
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_no_graph_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with isolate_sessions(), pytest.raises(UserError, match="onnxruntime cannot load it: "):
        open_session(tmp_path / "model.onnx")


def test_it_ends_with_whoever_waits_for_it(tmp_path):
    """Also where a graph never ends, and nobody could close it."""
    path, pid_file = endless(tmp_path), tmp_path / "process"

    def work():
        with isolate_sessions():
            inner = open_session(path).inner
            pid_file.write_text(str(inner._process.pid))
            inner._connection.send(IDS)
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_forked(work, tmp_path).returncode == -signal.SIGKILL
    wait_gone(int(pid_file.read_text()))
