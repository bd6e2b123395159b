"""`validate --runtime`, as people call it: outputs of blocks that differ, in each runtime that is installed."""

import json
from importlib.util import find_spec

import pytest
from click.testing import CliRunner

import ckpt_prune
from ckpt_prune.cli.main import main
from ckpt_prune.model.runtimes import RUNTIMES
from ckpt_prune.runtimes import proof
from tests.gguf_files.tiny import proving, save


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runtimes")
    dense = save(folder / "dense", "llama", tie_word_embeddings=True)
    uneven = {"widths": "per_layer", "allocation": "across-layers", "container": "remote", "ratio": 0.3}
    ckpt_prune.prune(dense, recipe="magnitude", overrides=uneven, output=folder / "out", progress=False)
    return folder / "out"


@pytest.fixture(scope="module")
def graph(output):
    text = proving(output).text[0]
    ckpt_prune.export(output, output=output / "onnx", text=text, samples=2, window=48, progress=False)
    return output / "onnx"


@pytest.mark.parametrize("runtime", ["transformers", "mlx", "vllm", "genai", "openvino"])
def test_a_runtime_computes_what_pytorch_does(output, request, runtime):
    module = proof._MODULES[runtime]
    if find_spec(module) is None:
        pytest.skip(f"{runtime} is not installed: {RUNTIMES[runtime].install}")
    if runtime in ("genai", "openvino"):
        request.getfixturevalue("graph")
    compare = ["--text", proving(output).text[0], "--samples", 2, "--window", 48]
    code, said = run("validate", output, "--runtime", runtime, *compare, "--json")
    assert code == 0, said
    values = json.loads(said)
    assert values["runtime"] == runtime
    assert values["passed"]
    assert values["kl"] < values["allowed"] == 1e-5
    assert values["top1"] == 1
    assert min(values["speeds"]) > 0


def test_other_weights_fail(output, tmp_path):
    other = save(tmp_path / "other", "llama", tie_word_embeddings=True, rms_norm_eps=0.1)
    compare = ["--text", proving(output).text[0], "--samples", 2, "--window", 48]
    code, said = run("validate", output, "--runtime", "transformers", "--against", other, *compare)
    assert code == 1
    assert "failed: transformers computes something else" in said


def test_a_runtime_that_is_not_installed_is_named_with_the_command_that_installs_it(output, monkeypatch):
    monkeypatch.setattr(proof, "find_spec", lambda _name: None)
    code, said = run("validate", output, "--runtime", "mlx")
    assert code == 2
    assert 'mlx is not installed: pip install "ckpt-prune[mlx]"' in said


def test_code_that_is_not_this_packages_is_not_run(output, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    (copy / "modeling_pruned.py").write_text("raise SystemExit")
    code, said = run("validate", copy, "--runtime", "transformers", "--text", proving(output).text[0])
    assert code == 2
    assert "which is not this package's: say --trust-remote-code" in said


def test_a_folder_that_a_runtime_cannot_load_is_refused_in_its_words(output, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(output, copy, ignore=shutil.ignore_patterns("onnx"))
    config = json.loads((copy / "config.json").read_text())
    del config["auto_map"]
    (copy / "config.json").write_text(json.dumps(config))
    code, said = run(
        "validate", copy, "--runtime", "transformers", "--against", output, "--text", proving(output).text[0]
    )
    assert code == 2
    assert "transformers does not run" in said
