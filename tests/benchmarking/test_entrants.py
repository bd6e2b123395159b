"""Which graph is taken, and what is left of those made here."""

import json
import shutil

import pytest

from ckpt_prune.benchmarking import entrants
from ckpt_prune.benchmarking.entrants import GraphWish, open_entrant, with_graph
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.onnx.folder import GraphWriter
from tests.cli.running import edit_weights

VARIANT = "llama-gqa-tied"


@pytest.fixture
def output(exported, tmp_path):
    """A checkpoint with its graph in its folder onnx."""
    model, graph = exported(VARIANT)
    shutil.copytree(model, tmp_path / "model")
    shutil.copytree(graph, tmp_path / "model" / "onnx")
    return tmp_path / "model"


def opened(folder, *, onnx=True, **wish):
    said = []
    return open_entrant("A", str(folder), GraphWish(**wish), said.append, onnx=onnx), said


def test_the_graph_in_its_folder_is_taken(output):
    found, said = opened(output)
    assert found.graph == output / "onnx"
    assert found.manifest.task == "text-generation"
    assert found.checkpoint.path == output
    assert said == [f"{output}: the graph is that in {output / 'onnx'}"]
    assert opened(output, dtype="fp32", optimize="none")[1] == said


@pytest.mark.parametrize(
    ("wish", "reason"),
    [({"dtype": "fp16"}, "it is fp32"), ({"optimize": "cpu"}, "it was written with --optimize none")],
)
def test_another_graph_than_that_in_its_folder_is_wanted(output, wish, reason):
    found, said = opened(output, **wish)
    assert (found.graph, found.manifest) == (None, None)
    assert said == [f"{output}: the graph in {output / 'onnx'} is not used: {reason}"]


def test_a_graph_of_other_weights_is_not_taken(output):
    edit_weights(output, lambda tensors: tensors["model.norm.weight"].add_(1))
    found, said = opened(output)
    assert found.graph is None
    assert said == [f"{output}: the graph in {output / 'onnx'} is not used: it was made of other weights"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"task": "feature-extraction", "cached": False},
            "it is for feature-extraction, not for text-generation with a cache",
        ),
        ({"cached": False}, "it is for text-generation, not for text-generation with a cache"),
    ],
)
def test_a_graph_for_another_task_is_not_taken(output, record, reason):
    path = output / "onnx" / GRAPH_RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | record))
    found, said = opened(output)
    assert (found.graph, found.manifest) == (None, None)
    assert said == [f"{output}: the graph in {output / 'onnx'} is not used: {reason}"]


def test_without_onnx_no_graph_is_looked_for(output):
    found, said = opened(output, onnx=False)
    assert (found.graph, said) == (None, [])


def test_an_exported_folder(exported):
    _, graph = exported(VARIANT)
    found, said = opened(graph, onnx=False)
    assert (found.graph, found.checkpoint, found.manifest.dtype, said) == (graph, None, "fp32", [])
    with pytest.raises(UserError) as caught:
        opened(graph, dtype="fp16")
    assert str(caught.value) == (
        f"{graph} is an exported graph, and it is fp32: give the checkpoint, or leave that option out"
    )


def test_a_graph_that_is_there_is_not_made_again(output, tmp_path):
    found, _ = opened(output)
    assert with_graph(found, GraphWish(), tmp_path / "scratch", pytest.fail, trust=False) is found


def test_a_graph_is_made_as_wanted(exported, tmp_path, monkeypatch):
    """The exporter is another room's; here only what it is asked for."""
    model, graph = exported(VARIANT)
    asked = []

    def write(writer, *, trust):
        asked.append((writer.source.path, writer.out, writer._settings.dtype, writer._settings.optimize, trust))
        return entrants.read_manifest(graph)

    monkeypatch.setattr(GraphWriter, "write", write)
    found, said = opened(model)
    made = with_graph(found, GraphWish("cpu", "fp16"), tmp_path, said.append, trust=True)
    assert asked == [(model, tmp_path / "A", ("fp16",), "cpu", True)]
    assert made.graph == tmp_path / "A"
    assert said == [f"{model}: exporting a graph, for this run only"]


def test_what_cannot_be_exported_is_named(exported, tmp_path):
    model, _ = exported(VARIANT)
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2}))
    found, said = opened(tmp_path / "model")
    with pytest.raises(UserError) as caught:
        with_graph(found, GraphWish(), tmp_path / "scratch", said.append, trust=False)
    assert str(caught.value).startswith(f"{tmp_path / 'model'} in onnxruntime: ")
