"""A recipe that ends in a graph: one `prune` from a dense model to what is deployed."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ckpt_prune.checkpoint import disk_space
from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.onnx import export as exporting
from tests.cli.conftest import EXPORT, PRUNE
from tests.cli.running import TEXT, edit_weights, listing, ok, poison, read_json, read_refusal, run
from tests.cli.test_prune import COSTS
from tests.graphs import traced_before

INSIDE = """\
onnx: files           ok
onnx: checker         ok
onnx: finite          ok
onnx: load            ok
onnx: validation      ok
onnx: source          ok
"""


@pytest.fixture
def again(place, finished, monkeypatch) -> Path:
    """A working folder where the same model is pruned and its graph is taken from there."""
    traced_before(monkeypatch, finished / "out" / "onnx")
    return place


def files(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def assert_complete(out: str) -> None:
    """Check that an output lacks nothing but its graph."""
    assert set(files(out)) - {"onnx.log"} == {
        *(
            "README.md",
            "ckpt_prune.json",
            "ckpt_prune_recipe.yaml",
            "config.json",
            "generation_config.json",
            "model.safetensors",
        ),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert "FAILED" not in ok("verify", out, "--against", "dense")


# ---- one command ---------------------------------------------------------------------------------------------------


def test_one_command_says_what_was_pruned_and_how_its_graph_compares(finished):
    output = (finished / "said").read_text()
    assert output.startswith(COSTS)
    pruned, graph = output.split("\nwritten to out\n")
    assert "\nUnits\n" in pruned
    lines = graph.splitlines()
    assert lines[0].startswith("onnxruntime - PyTorch ")
    assert not [line for line in lines if "FAILED" in line]
    end = lines.index("compared on: calib.txt")
    match = re.fullmatch(r"perplexity (\S+) in onnxruntime, (\S+) in PyTorch \(1 window of 16 tokens\)", lines[end - 2])
    assert match is not None
    assert float(match[1]) == pytest.approx(float(match[2]), rel=1e-4)
    assert lines[end - 1].startswith(f"perplexity {match[1]} in onnxruntime, ")
    assert " in PyTorch of dense (1 window of 16 tokens): " in lines[end - 1]
    assert lines[end + 1] == "the graph agrees with out (fp32, cpu, tolerance 0.0001 of the largest output)"
    verdict = "the output is hardly of use beside dense by its first choices: "
    assert lines[end + 2].startswith(f"{verdict}perplexity {float(match[1]):.4g} for ")
    written = r"text-generation, with cache, fp32, opset 20, \S+ KB: written to out/onnx"
    assert re.fullmatch(written, lines[end + 3])
    assert lines[-1].startswith("fewer bits lose less than pruning")
    assert "2 windows of 16 tokens of calib.txt that it was not calibrated on" in graph


def test_verify_checks_model_and_graph(finished, monkeypatch):
    monkeypatch.chdir(finished)
    output = ok("verify", "out", "--against", "dense")
    assert INSIDE in output
    assert output.splitlines()[-1] == "onnx: source: exported from out"
    assert "FAILED" not in output
    inside = ok("verify", "out/onnx", "--against", "out")
    assert [line.removeprefix("onnx: ") for line in output.splitlines()[-6:]] == inside.splitlines()[-6:]


def test_a_graph_of_another_model_inside(again, finished):
    """An output that is pruned anew, or changed, no longer is what its graph was made from."""
    shutil.copytree(finished / "out", "out")
    edit_weights("out", poison("model.norm.weight", 0.5))
    result = run("verify", "out", "--json")
    assert result.exit_code == 1
    failed = {check["name"]: check["detail"] for check in json.loads(result.stdout)["checks"] if not check["passed"]}
    failed.pop("sparsity")
    assert failed == {
        "digests": "model.safetensors changed since it was written",
        "onnx: source": "it was exported from another model than out: its record names out",
    }
    result = run("verify", "out/onnx", "--against", "dense")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == (
        "source: it was exported from another model than dense: its record names out"
    )


# ---- a dry run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("fp16", 2)])
def test_the_disk_has_room_for_both(place, monkeypatch, dtype, size):
    """For a recipe that measures before it writes, as for a dry run."""
    args = ["prune", "dense", "--recipe", "flap", "--ratio", "0.5", *TEXT, "-o", "out"]
    foreseen = json.loads(ok(*args, "--dry-run", "--json"))
    after, graph = foreseen["after"], size * foreseen["after"]["parameters"]
    needed = after["bytes"] + graph
    args += [*EXPORT, "--set", f"export.dtype={dtype}"]
    monkeypatch.setattr(disk_space, "_MARGIN_BYTES", 0)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    for more in ([], ["--dry-run"]):
        assert read_refusal(*args, *more) == (
            f"{Path.cwd()} has {human_bytes(needed - 1)} free and the output needs {human_bytes(needed)}; "
            "free space or choose another place"
        )
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    told = json.loads(ok(*args, "--dry-run", "--json"))["estimate"]
    assert (told["export_bytes"], told["disk_bytes"]) == (graph, foreseen["estimate"]["disk_bytes"] + graph)
    assert told["seconds"] == foreseen["estimate"]["seconds"]
    line = f"of disk, {human_bytes(graph)} of that for what is exported, where nothing else runs on this machine"
    assert f"{line}, without the time of the export" in ok(*args, "--dry-run")


# ---- what fails after the last -------------------------------------------------------------------------------------


def test_a_graph_that_does_not_pass_leaves_the_output_complete(again):
    result = run(*PRUNE, *EXPORT, "--set", "export.tolerance=1e-12", "-o", "out")
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert "written to out" in lines
    assert "the graph does not compute what the model does: nothing is written to out/onnx" in lines
    assert_complete("out")
    result = run(*PRUNE, *EXPORT, "--set", "export.tolerance=1e-12", "-o", "other", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    report = json.loads(result.stdout)
    assert (report["onnx"]["written"], report["onnx"]["manifest"]) == (False, None)
    assert report["onnx"]["validation"]["passed"] is False
    assert_complete("other")


def stop_with(error: BaseException):
    def stop(*_, **__):
        raise error

    return stop


@pytest.mark.parametrize("as_json", [False, True])
def test_an_output_that_cannot_be_exported_takes_its_place_and_the_command_that_writes_its_graph_is_named(
    again, monkeypatch, as_json
):
    monkeypatch.setattr(exporting, "trace_model", stop_with(UserError("cannot be exported")))
    result = CliRunner().invoke(main, [*PRUNE, *EXPORT, "-o", "out", *(["--json"] if as_json else [])])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "out is complete without its graph: `ckpt-prune export out -o out/onnx` writes it",
        "Error: cannot be exported",
    ]
    if not as_json:
        assert result.stdout.startswith(COSTS)
        assert result.stdout.endswith("written to out\n")
    else:
        report = json.loads(result.stdout)
        assert report.pop("onnx") == {"written": False, "error": "cannot be exported"}
        assert report.pop("messages") == []
        assert report.pop("fewer_bits").startswith("fewer bits lose less than pruning")
        assert report == read_json("out/ckpt_prune.json")
    assert_complete("out")


def test_an_export_that_is_interrupted_is_resumed_before_the_output_has_its_name(again, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "trace_model", stop_with(KeyboardInterrupt()))
        result = CliRunner().invoke(main, [*PRUNE, *EXPORT, "-o", "out"])
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines() == [
        "out.partial keeps what is done: the same command with --resume continues",
        "Interrupted.",
    ]
    assert not Path("out").exists()
    result = run(*PRUNE, *EXPORT, "-o", "out", "--resume")
    assert result.exit_code == 0
    assert result.stderr == "resuming out.partial: all done but what is exported of it\n"
    assert ": written to out/onnx\n" in result.stdout
    assert result.stdout.endswith(f"{read_json('out/ckpt_prune.json')['loss']['verdict']}\n")
    assert INSIDE in ok("verify", "out", "--against", "dense")


def leave_without_graph(monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """Standard error of a run that cannot make its graph."""
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "trace_model", stop_with(UserError("cannot be exported")))
        result = run(*PRUNE, *EXPORT, *more, "-o", "out")
    assert result.exit_code == 2
    assert_complete("out")
    return result.stderr


def test_resumed_with_the_graph_alone(again, monkeypatch):
    leave_without_graph(monkeypatch)
    before = listing()
    run(*PRUNE, *EXPORT, "-o", "out", "--resume", "--dry-run")
    assert_complete("out")
    result = run(*PRUNE, *EXPORT, "-o", "out", "--resume")
    assert (result.exit_code, result.stderr) == (0, "out is complete: only its graph is missing\n")
    assert result.stdout.startswith("onnxruntime - PyTorch ")
    assert ": written to out/onnx\n" in result.stdout
    assert read_json("out/ckpt_prune.json")["loss"]["verdict"] in result.stdout
    told = {"out", "out/README.md", "out/ckpt_prune.json"}
    assert {name: listing()[name] for name in before.keys() - told} == {
        name: before[name] for name in before.keys() - told
    }
    assert INSIDE in ok("verify", "out", "--against", "dense")
    # Then there is nothing to resume.
    before = listing()
    result = run(*PRUNE, *EXPORT, "-o", "out", "--resume")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "out is finished: nothing is left to do\n")
    assert listing() == before


def test_another_recipe_is_not_resumed(again, monkeypatch):
    leave_without_graph(monkeypatch)
    exists = f"{Path.cwd() / 'out'} exists; --overwrite replaces it, or give another -o"
    for other in (("--set", "name=other"), ("--set", "export.dtype=fp16"), ("--set", "spaces.mlp.multiple_of=2")):
        assert read_refusal(*PRUNE, *EXPORT, *other, "-o", "out", "--resume") == exists
    edit_weights("dense", poison("model.norm.weight", 0.5))
    assert read_refusal(*PRUNE, *EXPORT, "-o", "out", "--resume") == exists


def test_the_command_that_is_named_has_the_recipes_settings(place, monkeypatch):
    settings = ("export.dtype=fp16", "export.opset=18", "export.cache=false", "export.optimize=cpu")
    more = [word for setting in (*settings, "export.validate=false") for word in ("--set", setting)]
    output = leave_without_graph(monkeypatch, *more)
    assert output.splitlines()[0] == (
        "out is complete without its graph: `ckpt-prune export out -o out/onnx --opset 18 --dtype fp16 --no-cache "
        "--optimize cpu --no-validate` writes it"
    )
