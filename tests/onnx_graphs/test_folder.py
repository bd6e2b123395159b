"""The folder that is deployed: complete and true, or not there at all; nothing else is touched."""

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, GenerationConfig

from ckpt_prune.checkpoint import disk_space
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import RECIPE
from ckpt_prune.onnx import export as exporting
from ckpt_prune.onnx.export import GraphWriter, estimate_graphs_bytes
from ckpt_prune.onnx.records import Manifest, read_manifest
from ckpt_prune.options.graphs import GraphSettings
from tests import refusals
from tests.families import contents
from tests.graphs import Exported, traced_before
from tests.pairs import choose_cases

from .exports import Graph, make_exports, pixels

CHECKPOINT_ONLY = {
    *("model.safetensors", "ckpt_prune.json", "rotations.st", "modeling_pruned.py", "mlx_pruned.py", "README.md"),
    RECIPE,
}
OWN = {"model.onnx", "config.json", "ckpt_prune_onnx.json", "README.md"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Exported:
    return make_exports(tmp_path_factory)


@pytest.fixture
def vit(exported, tmp_path, monkeypatch) -> Path:
    """A copy of a model in an otherwise empty working folder; it is traced no more."""
    model, graph = exported("dinov2-model")
    traced_before(monkeypatch, graph)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "vit")
    return Path("vit")


def writer(model: Path, out: str | Path = "out", *, overwrite: bool = False, **settings: Any) -> GraphWriter:
    return GraphWriter(Checkpoint.open(model), Path(out), GraphSettings(**settings), overwrite=overwrite)


def refusal(model: Path, out: str | Path = "out", **options: Any) -> str:
    """The one line of an export that is refused before anything is written."""
    before = everything()
    line = refusals.refusal(writer, model, out, **options)
    assert everything() == before
    return line


def everything() -> dict[str, bytes | None]:
    """Every file's bytes below the working folder, and every folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(Path().rglob("*"))}


# ---- what is in it -------------------------------------------------------------------------------------------------


def test_modules_of_a_sentence_transformers_folder_travel_and_are_replaced(vit):
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (vit / "modules.json").write_text(json.dumps(modules))
    (vit / "1_Pooling").mkdir()
    (vit / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    manifest = writer(vit).write()
    assert manifest is not None
    assert {"1_Pooling/config.json", "modules.json"} <= manifest.files.keys()
    writer(vit, overwrite=True).write()
    assert contents(Path("out"))["1_Pooling/config.json"] == b'{"pooling_mode_cls_token": true}'


@pytest.mark.parametrize(
    "name",
    choose_cases(
        ["llama-gqa-tied", "uneven-llama", "turned-llama", "bert-mlm", "dinov2-model", "narrow-opt"],
        lambda name: name != "turned-llama",
    ),
)
def test_a_folder_holds_what_travels_and_nothing_of_the_checkpoint_alone(exported, name):
    settings: dict[str, Any] = {"optimize": "cpu"} if name == "turned-llama" else {}
    model, folder = exported(name, **settings)
    of_model, of_graph = contents(model), contents(folder)
    travels = set(of_model) - CHECKPOINT_ONLY - {"config.json"}
    genai = {"genai_config.json"} if name in ("llama-gqa-tied", "turned-llama", "uneven-llama") else set()
    assert set(of_graph) == OWN | travels | genai
    assert {"tokenizer.json", "preprocessor_config.json"} & travels
    assert {key: of_graph[key] for key in travels} == {key: of_model[key] for key in travels}
    config, before = json.loads(of_graph["config.json"]), json.loads(of_model["config.json"])
    assert ("auto_map" in before) is (name in ("uneven-llama", "turned-llama", "narrow-opt"))
    before.pop("auto_map", None)
    before.pop("transformers_weights", None)
    before.pop("model_file", None)
    if before["model_type"] == "seed_oss":
        before |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert config == before
    # And transformers reads them, without code of the model's own.
    assert AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type == before["model_type"]
    if "tokenizer.json" in of_graph:
        assert AutoTokenizer.from_pretrained(folder)("the cat").input_ids
    else:
        assert AutoImageProcessor.from_pretrained(folder).size.height == 12
    if name in ("llama-gqa-tied", "uneven-llama"):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == 1


@pytest.mark.parametrize("name", ["llama-gqa-tied", "uneven-llama"])
def test_the_record_names_files_weights_and_source(exported, name):
    model, folder = exported(name)
    record = json.loads((folder / "ckpt_prune_onnx.json").read_text())
    deployed = {path.name for path in folder.iterdir()} - {"ckpt_prune_onnx.json", "README.md"}
    assert {"model.onnx", "config.json", "generation_config.json", "tokenizer.json"} <= deployed
    assert record["files"] == {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in deployed}
    stated = onnx.load(folder / "model.onnx")
    weights = {initializer.name: numpy_helper.to_array(initializer) for initializer in stated.graph.initializer}
    assert record["graphs"][0]["tensors"] == {
        key: hashlib.sha256(w.tobytes()).hexdigest() for key, w in weights.items()
    }
    assert record["source"] == {"name": model.name, "fingerprint": Checkpoint.open(model).fingerprint}
    assert record["versions"]["onnx"] == onnx.__version__
    assert set(record["versions"]) == {"ckpt_prune", "torch", "transformers", "onnx", "onnxscript", "onnxruntime"}
    keys = ("task", "modality", "cached", "optimize")
    assert [record[key] for key in keys] == ["text-generation", "text", True, "none"]
    (graph,) = record["graphs"]
    assert [graph[key] for key in ("file", "dtype", "opset", "quantization")] == ["model.onnx", "fp32", 20, None]
    for what, values in (("inputs", stated.graph.input), ("outputs", stated.graph.output)):
        assert [port["name"] for port in graph[what]] == [value.name for value in values]


@pytest.mark.parametrize("name", ["llama-gqa-tied", "uneven-llama"])
def test_weights_are_the_models_own(exported, name):
    """By their names, as they are or transposed: nothing is left out and nothing is made up."""
    model, folder = exported(name)
    stored = Checkpoint.open(model)
    tensors = {key: tensor.numpy() for key, tensor in stored.read(stored.tensors).items()}
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    graph = onnx.load(folder / "model.onnx").graph
    weights = {initializer.name: numpy_helper.to_array(initializer) for initializer in graph.initializer}
    for key, weight in weights.items():
        if weight.ndim == 2:
            turned = key.endswith(".T")
            assert np.array_equal(weight.T if turned else weight, tensors[key.removesuffix(".T")]), key
    names = {key.removesuffix(".T") for key in weights}
    # Tied ones have either name, and nothing is added where a bias is zero.
    for key in set(tensors) - names - {"model.embed_tokens.weight", "lm_head.weight"}:
        assert key.endswith("bias"), key
        assert not tensors[key].any(), key


@pytest.mark.parametrize(
    "name", choose_cases(["mistral-window", "llama-gqa-tied"], lambda name: name == "llama-gqa-tied")
)
def test_no_weight_is_stored_twice(exported, name):
    model, folder = exported(name)
    parameters = sum(info.numel for info in Checkpoint.open(model).tensors.values())
    assert sum(entry["size"] for entry in sizes(folder)) < 4 * parameters + 1024


def test_the_record_is_read_back(exported, tmp_path):
    _, folder = exported("llama-gqa-tied")
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    assert manifest.model_dump() == json.loads((folder / "ckpt_prune_onnx.json").read_text())
    with pytest.raises(UserError) as error:
        read_manifest(tmp_path)
    assert str(error.value) == f"{tmp_path} has no ckpt_prune_onnx.json: it was not written by `ckpt-prune export`"
    for text in ("", "{", "[]", "{}", '{"version": 3}'):
        (tmp_path / "ckpt_prune_onnx.json").write_text(text)
        with pytest.raises(UserError) as error:
            read_manifest(tmp_path)
        assert str(error.value) == f"{tmp_path / 'ckpt_prune_onnx.json'} is damaged: export again"


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 400), ("fp16", 200), (("fp32", "int8"), 500), ("int4", 56)])
def test_sizes_are_estimated_by_type(dtype, expected):
    assert estimate_graphs_bytes(GraphSettings(dtype=dtype), 100) == expected


# ---- external data -------------------------------------------------------------------------------------------------


def test_weights_in_a_file_of_their_own_compute_the_same(vit, exported):
    manifest = writer(vit).write(embedded=0)
    one_file = exported("dinov2-model")[1]
    out = Path("out")
    assert {path.name for path in out.iterdir()} == {path.name for path in one_file.iterdir()} | {"model.onnx_data"}
    assert manifest is not None
    assert manifest.files == {
        file: hashlib.sha256((out / file).read_bytes()).hexdigest()
        for file in ("model.onnx", "model.onnx_data", "config.json", "preprocessor_config.json")
    }
    assert manifest.graph.tensors == read_manifest(one_file).graph.tensors
    largest = max(entry["size"] for entry in sizes(one_file))
    assert (out / "model.onnx").stat().st_size < (one_file / "model.onnx").stat().st_size - largest
    feed = {"pixel_values": pixels(3)}
    ours, theirs = Graph(out)(feed), Graph(one_file)(feed)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    onnx.checker.check_model(str(out / "model.onnx"), full_check=True)


def sizes(folder: Path) -> list[dict[str, Any]]:
    graph = onnx.load(folder / "model.onnx").graph
    return [
        {"name": initializer.name, "size": numpy_helper.to_array(initializer).nbytes}
        for initializer in graph.initializer
    ]


@pytest.mark.parametrize(("spare", "external"), [(0, False), (-1, True)])
def test_weights_go_to_a_file_of_their_own_above_a_size(vit, exported, spare, external):
    total = sum(entry["size"] for entry in sizes(exported("dinov2-model")[1]))
    writer(vit).write(embedded=total + spare)
    assert Path("out/model.onnx_data").exists() is external


# ---- where it goes -------------------------------------------------------------------------------------------------


def test_an_output_is_replaced_with_overwrite_alone(vit):
    writer(vit).write()
    before = everything()
    assert refusal(vit) == f"{Path.cwd() / 'out'} exists; --overwrite replaces it, or give another -o"
    Path("out/note.txt").write_text("mine")
    Path("out/model.onnx").write_bytes(b"damaged")
    writer(vit, overwrite=True).write()
    assert everything() == before | {"out/note.txt": b"mine"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_export_is_never_replaced(vit, overwrite):
    shutil.copytree(vit, "out")
    Path("out/model.onnx").write_bytes(b"of optimum")
    assert refusal(vit, overwrite=overwrite) == (
        f"{Path.cwd() / 'out'} exists and is not an exported folder (it has no ckpt_prune_onnx.json), so it is never "
        "replaced; choose another name"
    )


def test_a_graph_inside_the_model_changes_nothing_of_it(vit):
    before, fingerprint = contents(vit), Checkpoint.open(vit).fingerprint
    manifest = writer(vit, "vit/onnx").write()
    assert manifest is not None
    assert manifest.source.fingerprint == fingerprint == Checkpoint.open(vit).fingerprint
    after = contents(vit)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in set(after) - set(before)} == {"onnx"}
    # What is copied from the model next time is what was before.
    again = writer(vit, "elsewhere").write()
    assert again == manifest
    assert contents(Path("elsewhere")) == contents(Path("vit/onnx"))


@pytest.mark.parametrize("out", [".", "vit/../vit", "link"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_holds_the_model_is_refused(vit, out, overwrite):
    Path("link").symlink_to("vit")
    assert refusal(vit, out, overwrite=overwrite) == (
        f"output {Path(out)} holds the model vit: choose another place, or a new folder inside"
    )


# ---- runs that end in the middle -----------------------------------------------------------------------------------


def ending(model: Path, error: type[BaseException], *, overwrite: bool = False, **options: Any) -> BaseException:
    """An export that ends in an error leaves all as it was."""
    before = everything()
    with pytest.raises(error) as caught:
        writer(model, overwrite=overwrite).write(**options)
    assert everything() == before
    return caught.value


@pytest.fixture(params=[False, True], ids=["new", "over an old one"])
def overwrite(request, vit) -> bool:
    """Whether there is an old output, which has to stay as it is."""
    if request.param:
        writer(vit).write()
        Path("out/note.txt").write_text("mine")
    return request.param


def raising(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_proof_that_fails_leaves_nothing(vit, overwrite):
    before, seen = everything(), []

    def prove(folder: Path) -> bool:
        seen.append({path.name for path in folder.iterdir() if not path.name.startswith(".")})
        return False

    assert writer(vit, overwrite=overwrite).write(prove=prove) is None
    assert everything() == before
    # It was shown the finished folder.
    assert seen == [OWN | {"preprocessor_config.json"}]


def test_what_a_proof_writes_stays_in_the_folder(vit, overwrite):
    def prove(folder: Path) -> bool:
        (folder / "validation.json").write_text("{}")
        assert not overwrite or Path("out/note.txt").exists()
        return True

    assert writer(vit, overwrite=overwrite).write(prove=prove) == read_manifest(Path("out"))
    assert Path("out/validation.json").read_text() == "{}"
    assert sorted(str(path) for path in Path().iterdir()) == ["out", "vit"]


@pytest.mark.parametrize("passed", [False, True])
def test_a_model_that_changes_while_its_graph_is_proved_is_an_error(vit, passed):
    """Weights of another model were read for the proof, which said that the graph is wrong."""

    def prove(folder: Path) -> bool:
        os.utime(vit / "model.safetensors", (1, 1))
        return passed

    with pytest.raises(UserError) as error:
        writer(vit).write(prove=prove)
    assert str(error.value).endswith("vit/model.safetensors changed since it was opened; run again")
    assert not Path("out").exists()


@pytest.mark.parametrize("where", ["tracing", "proof"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_end_in_the_middle_leaves_nothing(vit, overwrite, monkeypatch, where, error):
    if where == "tracing":
        monkeypatch.setattr(exporting, "trace_model", raising(error))
    prove = raising(error) if where == "proof" else None
    assert ending(vit, type(error), overwrite=overwrite, prove=prove) is error
    # And nothing holds the place.
    monkeypatch.undo()


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """A file system where no file gets larger: writing fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("embedded", [0, 1 << 30], ids=["external data", "embedded"])
def test_a_disk_that_fills_up_leaves_nothing(vit, overwrite, embedded):
    assert sum(entry["size"] for entry in sizes_of(vit)) > 2 * 8192
    with largest_file(8192):
        error = ending(vit, UserError, overwrite=overwrite, embedded=embedded)
    assert str(error) == (
        f"cannot write {Path.cwd() / 'out.partial'} (File too large); free space or choose another place"
    )


def sizes_of(model: Path) -> list[dict[str, Any]]:
    return [{"size": info.numel * 4} for info in Checkpoint.open(model).tensors.values()]


@pytest.mark.parametrize(("dtype", "bytes_per_weight"), [("fp32", 4), ("fp16", 2)])
def test_too_little_room_is_refused_before_anything_is_written(vit, monkeypatch, dtype, bytes_per_weight):
    before = everything()
    monkeypatch.setattr(disk_space, "_MARGIN_BYTES", 0)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: SimpleNamespace(free=4000))
    needed = bytes_per_weight * sum(info.numel for info in Checkpoint.open(vit).tensors.values()) / 1000
    assert refusals.refusal(writer(vit, dtype=dtype).write) == (
        f"{Path.cwd()} has 4.00 KB free and the graph needs {needed:.3g} KB; free space or choose another place"
    )
    assert everything() == before


# ---- runs that were killed, and two at once --------------------------------------------------------------------------


def kill_in_the_middle(model: Path, monkeypatch: pytest.MonkeyPatch, *, overwrite: bool = False) -> None:
    """Leave what a kill leaves: nobody clears up, and the system lets go of the lock."""
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", Staging.release)
        with pytest.raises(SystemExit):
            writer(model, overwrite=overwrite).write(prove=raising(SystemExit()))
    assert Path("out.partial/model.onnx").is_file()


def test_what_a_killed_run_left_is_dropped_with_overwrite_alone(vit, overwrite, monkeypatch):
    before = everything()
    kill_in_the_middle(vit, monkeypatch, overwrite=overwrite)
    assert {key: value for key, value in everything().items() if not key.startswith("out.partial")} == before
    Path("out.partial/rest.bin").write_bytes(b"of the killed run")
    assert refusal(vit) == (f"{Path.cwd() / 'out.partial'} is left from an unfinished run; --overwrite starts afresh")
    writer(vit, overwrite=True).write()
    assert sorted(str(path) for path in Path().iterdir()) == ["out", "vit"]
    kept = {"note.txt"} if overwrite else set()
    assert {path.name for path in Path("out").iterdir()} == OWN | {"preprocessor_config.json"} | kept
