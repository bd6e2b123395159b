"""A whole export passes without its model; every kind of damage fails, and says what is damaged."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from ckpt_prune.onnx.checks import verify_graph
from ckpt_prune.onnx.proof import validate
from ckpt_prune.onnx.samples import ProofSamples
from tests.refusals import refusal

from .exports import make_exports

NAMES = ["files", "checker", "finite", "load", "validation"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path]:
    """A model and its graph with external data, compared with it."""
    model, graph = make_exports(tmp_path_factory)("bert-mlm", embedded=0)
    folder = tmp_path_factory.mktemp("whole") / "graph"
    shutil.copytree(graph, folder)
    validate(folder, model, ProofSamples()).write(folder)
    return model, folder


@pytest.fixture
def model(whole) -> Path:
    return whole[0]


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    shutil.copytree(whole[1], tmp_path / "graph")
    return tmp_path / "graph"


STALE = "validation.json is not about these files: run `ckpt-prune validate`"


def failures(folder: Path, source: Path | None = None) -> dict[str, str]:
    """Return the detail of every check that fails, by its name."""
    checks = verify_graph(folder, source)
    assert [check.name for check in checks] == [*NAMES, *(["source"] if source else [])]
    return {check.name: check.detail for check in checks if check.passed is False}


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def acknowledge(folder: Path, *, validated: bool = False) -> None:
    """Fix the record up for what the files are now, as one would who hides a change."""
    kept = {"README.md", "ckpt_prune_onnx.json", "validation.json"}
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name not in kept
    }
    graph = onnx.load(folder / "model.onnx").graph
    tensors = {w.name: hashlib.sha256(numpy_helper.to_array(w).tobytes()).hexdigest() for w in graph.initializer}
    edit(
        folder / "ckpt_prune_onnx.json",
        lambda record: (record.update(files=digests), record["graphs"][0].update(tensors=tensors)),
    )
    if validated:
        edit(folder / "validation.json", lambda record: record["graphs"][0].update(files=digests))


def place(folder: Path, name: str) -> tuple[int, int]:
    """Offset and length of a weight in the external data."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    (weight,) = [initializer for initializer in graph.initializer if initializer.name == name]
    where = {entry.key: entry.value for entry in weight.external_data}
    return int(where.get("offset", 0)), int(where["length"])


def some_weight(folder: Path) -> str:
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    return next(w.name for w in graph.initializer if w.external_data and ".layer.0." in w.name and len(w.dims) == 2)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_whole_folder_passes(folder, model):
    checks = verify_graph(folder, model)
    assert {check.name: check.passed for check in checks} == dict.fromkeys([*NAMES, "source"], True)
    details = {check.name: check.detail for check in checks}
    count = len(onnx.load(folder / "model.onnx").graph.initializer)
    cases = len(json.loads((folder / "validation.json").read_text())["graphs"][0]["cases"])
    assert details == {
        "files": "5 files as written",
        "checker": "onnx.checker, opset 20",
        "finite": f"no NaN, no Inf in {count} tensors",
        "load": "onnxruntime loads it: 3 inputs, 1 outputs",
        "validation": f"compared with PyTorch on {cases} inputs, on cpu: within the tolerance",
        "source": f"exported from {model}",
    }
    assert [check.name for check in verify_graph(folder)] == NAMES


def test_a_changed_byte_names_its_weight(folder):
    name = some_weight(folder)
    offset, _ = place(folder, name)
    before = (folder / "model.onnx_data").read_bytes()[offset]
    overwrite(folder / "model.onnx_data", offset, bytes([before ^ 1]))
    total = len(json.loads((folder / "ckpt_prune_onnx.json").read_text())["graphs"][0]["tensors"])
    assert failures(folder) == {
        "files": f"model.onnx_data changed since it was written: 1 of {total} weights differ or cannot be read: {name}",
        "validation": STALE,
    }


def test_a_changed_byte_outside_weights_is_told_from_a_weight(folder):
    """A changed byte of the producer's name in the graph is reported as one that is in no weight."""
    data = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(data.replace(b"ckpt_prune", b"ckpt_prunE", 1))
    total = len(json.loads((folder / "ckpt_prune_onnx.json").read_text())["graphs"][0]["tensors"])
    assert failures(folder) == {
        "files": f"model.onnx changed since it was written: not in its {total} weights",
        "validation": STALE,
    }


def test_names_in_a_damaged_graph_are_not_printed(folder, capfd):
    """onnx_ir warns of a name that nothing makes, as it stands there; the fuzzer found a NUL on the terminal."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    graph.graph.node[-1].input[0] = "v\x1b[2J"
    onnx.save(graph, folder / "model.onnx")
    assert {"files", "checker", "load"} <= set(failures(folder))
    assert capfd.readouterr().err == ""


def test_data_that_is_cut_off_fails(folder):
    os.truncate(folder / "model.onnx_data", (folder / "model.onnx_data").stat().st_size // 2)
    details = failures(folder)
    assert set(details) == {"files", "finite", "load", "validation"}
    assert details["files"].startswith("model.onnx_data changed since it was written: ")
    assert "weights differ or cannot be read: " in details["files"]
    assert details["finite"].startswith("model.onnx cannot be read: ")
    assert details["load"].startswith(f"{folder / 'model.onnx'}: onnxruntime cannot load it: ")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_graph_that_is_cut_off_fails_in_one_line_each(folder, share):
    os.truncate(folder / "model.onnx", int(share * (folder / "model.onnx").stat().st_size))
    details = failures(folder)
    assert {"files", "load"} <= set(details)
    assert details["files"].startswith("model.onnx changed since it was written: ")
    assert all("\n" not in detail for detail in details.values())


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx_data", "config.json"])
def test_a_file_that_is_gone_is_named(folder, name):
    (folder / name).unlink()
    details = failures(folder)
    assert details["files"] == f"{name} is gone"
    assert ("load" in details) is (name != "config.json")


@pytest.mark.parametrize("value", [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"], ids=["nan", "inf"])
@pytest.mark.parametrize("validated", [False, True])
def test_nan_and_inf_fail_however_the_records_are_fixed_up(folder, value, validated):
    """However the records were fixed up for it."""
    name = some_weight(folder)
    overwrite(folder / "model.onnx_data", place(folder, name)[0] + 8, value)
    acknowledge(folder, validated=validated)
    assert failures(folder) == {"finite": f"{name} has NaN or Inf"} | ({} if validated else {"validation": STALE})


# ---- what was compared ---------------------------------------------------------------------------------------------


def test_a_graph_that_was_not_compared_is_said_to_be_so(folder):
    (folder / "validation.json").unlink()
    checks = {check.name: check for check in verify_graph(folder)}
    assert checks["validation"].passed is None
    assert checks["validation"].detail == (
        "no validation.json: not compared with PyTorch, `ckpt-prune validate` does it"
    )
    assert failures(folder) == {}


WRONG = "validation.json says that the graph does not compute what the model does"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph.update(passed=False), WRONG),
        (lambda graph: graph["files"].update({"model.onnx_data": "0" * 64}), STALE),
        (lambda graph: graph["files"].pop("model.onnx"), STALE),
        (lambda graph: graph["against"].update(fingerprint="0" * 64), STALE),
    ],
)
def test_a_comparison_that_failed_or_is_of_something_else_fails(folder, change, message):
    edit(folder / "validation.json", lambda record: change(record["graphs"][0]))
    assert failures(folder) == {"validation": message}


def test_damaged_records_are_refused(folder):
    (folder / "validation.json").write_text("{")
    assert failures(folder) == {"validation": f"{folder / 'validation.json'} is damaged: validate again"}
    (folder / "ckpt_prune_onnx.json").write_text("{}")
    assert refusal(verify_graph, folder) == f"{folder / 'ckpt_prune_onnx.json'} is damaged: export again"


# ---- what it is of -------------------------------------------------------------------------------------------------


def test_a_graph_of_another_model_fails(folder, model, tmp_path):
    shutil.copytree(model, tmp_path / "other")
    weights = bytearray((tmp_path / "other" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "other" / "model.safetensors").write_bytes(weights)
    assert failures(folder, tmp_path / "other") == {
        "source": f"it was exported from another model than {tmp_path / 'other'}: its record names bert-mlm"
    }


def test_a_source_that_is_no_model_fails(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    details = failures(folder, tmp_path / "empty")
    assert set(details) == {"source"}
    assert details["source"].startswith(f"{tmp_path / 'empty'} has no config.json")
