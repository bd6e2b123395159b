"""`evaluate` on ONNX graphs, in the place of either model."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.running import ok, read_refusal
from tests.onnx_graphs.exports import make_exports

TEXT = ("--text", "text.txt", "--window", "16", "--samples", "4")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    export = make_exports(tmp_path_factory)
    return {name: export(name) for name in ("llama-gqa-tied", "deit-teacher")}


@pytest.fixture
def place(graphs, tmp_path, monkeypatch) -> Path:
    for name, (model, graph) in graphs.items():
        shutil.copytree(model, tmp_path / name)
        shutil.copytree(graph, tmp_path / f"{name}-onnx")
    (tmp_path / "text.txt").write_text("the cat sat on a mat and then the dog ran far away " * 10)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def figures(*arguments: str) -> dict:
    return json.loads(ok("evaluate", *arguments, "--json"))


def test_a_folder_with_one_graph_is_measured_as_its_model_is(place):
    """A graph without a record, as any tool may have written it, has the perplexity of its model."""
    for name in ("ckpt_prune_onnx.json", "README.md"):
        (place / "llama-gqa-tied-onnx" / name).unlink()
    model, graph = (figures(name, *TEXT) for name in ("llama-gqa-tied", "llama-gqa-tied-onnx"))
    assert graph["model"] == "llama-gqa-tied-onnx/model.onnx"
    assert graph["perplexity"] == pytest.approx(model["perplexity"], rel=1e-5)


def test_a_graph_against_its_model_and_against_another_in_its_folder(place):
    graph = "llama-gqa-tied-onnx/model.onnx"
    shutil.copy(graph, "llama-gqa-tied-onnx/model_other.onnx")
    report = figures(graph, "--against", "llama-gqa-tied", *TEXT)
    assert (report["kl"], report["top1_agreement"]) == (pytest.approx(0, abs=1e-6), 1.0)
    output = ok("evaluate", graph, "--against", "llama-gqa-tied-onnx/model_other.onnx", *TEXT)
    assert "model_other.onnx" in output
    assert read_refusal("evaluate", "llama-gqa-tied-onnx", *TEXT) == (
        "llama-gqa-tied-onnx holds 2 graphs: give one of them, such as llama-gqa-tied-onnx/model.onnx"
    )


def test_what_is_for_checkpoints(place):
    assert read_refusal("evaluate", "llama-gqa-tied-onnx", "--generate", "the cat") == (
        "llama-gqa-tied-onnx/model.onnx is a graph: --generate is for checkpoints; validate lets both continue"
    )
    assert read_refusal("evaluate", "llama-gqa-tied-onnx", "--tasks", "arc_easy") == (
        "llama-gqa-tied-onnx/model.onnx is a graph: it is measured with --text, --images or --tasks FILE.jsonl"
    )


def test_what_is_no_graph(place):
    Path("llama-gqa-tied-onnx/model.onnx").write_bytes(b"graph")
    message = read_refusal("evaluate", "llama-gqa-tied-onnx", *TEXT)
    assert message.startswith("llama-gqa-tied-onnx/model.onnx: onnxruntime cannot load it: ")
    assert read_refusal("evaluate", "none.onnx", *TEXT) == "none.onnx: there is no such graph"
