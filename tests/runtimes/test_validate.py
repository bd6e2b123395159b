"""`validate --runtime`, as people call it: two blocks of the carried model, pruned to shapes of their own, with fewer
tokens.

In each runtime that is installed: `tools/test` installs llama.cpp, onnxruntime-genai and OpenVINO, `tools/test
--runtimes` the others.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.exporters.configs import OpenVINOConfig
from transformers.exporters.exporter_openvino import OpenVINOExporter

import ckpt_prune
from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets.standard_library import read_corpus
from ckpt_prune.demo.run import model_folder
from ckpt_prune.runtimes import isolation, proof
from tests.forked import fork_module, posix
from tests.graphs import with_layers
from tests.pairs import choose_cases


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def plant(folder: Path, name: str, **values: object) -> None:
    """Put values into a JSON file of a folder, and a file of Python beside it that would end the process."""
    path = folder / name
    current = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(current | values))
    (folder / "planted.py").write_text("raise SystemExit('planted')")


def copy_of(output, place):
    return shutil.copytree(output, place / "copy", ignore=shutil.ignore_patterns("onnx"))


def prune_unevenly(dense, out):
    uneven = {"widths": "per_layer", "allocation": "across-layers", "container": "remote", "ratio": 0.3}
    smaller = uneven | {"vocabulary": {"size": "75%"}}
    ckpt_prune.prune(dense, recipe="magnitude", overrides=smaller, output=out, progress=False)
    return out


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runtimes")
    shutil.copytree(model_folder(), folder / "dense")
    return prune_unevenly(with_layers(folder / "dense", 2, of=6), folder / "out")


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory):
    """Heads of 64 and random weights: vLLM has no attention for the carried model's heads of 24."""
    folder = tmp_path_factory.mktemp("wide")
    dense = shutil.copytree(model_folder(), folder / "dense")
    config = json.loads((dense / "config.json").read_text())
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**config | shape | {"intermediate_size": 96, "num_hidden_layers": 2}))
    model.save_pretrained(dense)
    return prune_unevenly(dense, folder / "out")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "held_out.txt"
    path.write_text(read_corpus(held_out=True)[:20_000])
    return path


@pytest.fixture(scope="module")
def graph(output, text):
    ckpt_prune.export(output, output=output / "onnx", text=text, samples=2, window=48, progress=False)
    return output / "onnx"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its own tree of inputs
def test_the_exporter_of_transformers_makes_a_model_of_openvino_from_an_output(output):
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    model = ckpt_prune.load(output).float().eval()
    inputs = {"input_ids": torch.arange(2, 14)[None], "attention_mask": torch.ones(1, 12, dtype=torch.int64)}
    settings = OpenVINOConfig(dynamic=True, stateful=False)
    exported = OpenVINOExporter().export(model, inputs, settings).components["model"].program
    compiled = openvino.compile_model(exported, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    longer = {"input_ids": torch.arange(40, 60)[None], "attention_mask": torch.ones(1, 20, dtype=torch.int64)}
    given = torch.from_numpy(compiled({name: value.numpy() for name, value in longer.items()})["logits"])
    with torch.no_grad():
        expected = model(**longer).logits
    assert given.shape == expected.shape
    assert float((given - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize(
    "runtime", choose_cases(["transformers", "mlx", "vllm", *proof.GRAPHS], lambda runtime: runtime not in proof.GRAPHS)
)
def test_a_runtime_computes_what_pytorch_does(output, text, request, runtime, tmp_path, monkeypatch):
    try:
        proof.require_runtime(runtime)
    except UserError as error:
        pytest.skip(str(error))
    if runtime in proof.GRAPHS:
        request.getfixturevalue("graph")
    if runtime == "transformers" and hasattr(os, "fork"):  # the others run in a new Python, as for users
        fork_module(monkeypatch, isolation, tmp_path)
    folder = request.getfixturevalue("wide_heads") if runtime == "vllm" else output
    compare = ["--text", text, "--samples", 2, "--window", 48]
    code, command_output = run("validate", folder, "--runtime", runtime, *compare, "--json")
    assert code == 0, command_output
    values = json.loads(command_output)
    assert values["runtime"] == runtime
    assert values["passed"]
    assert values["kl"] < values["allowed"] == 1e-5
    assert values["texts"] == (6 if runtime in ("genai", "transformers.js") else None)
    assert values["top1"] == 1
    assert min(values["speeds"]) > 0


def test_vllm_computes_blocks_without_attention(wide_heads, text, tmp_path):
    """In a class of its own, which is not that of uneven blocks."""
    try:
        proof.require_runtime("vllm")
    except UserError as error:
        pytest.skip(str(error))
    recipe = {"depth": {"part": "attention", "blocks": [1]}, "container": "remote"}
    dense, out = wide_heads.parent / "dense", tmp_path / "out"
    ckpt_prune.prune(dense, recipe="shortgpt", overrides=recipe, output=out, progress=False)
    code, message = run("validate", out, "--runtime", "vllm", "--text", text, "--samples", 2, "--window", 48)
    assert code == 0, message


def test_llama_cpp_computes_what_pytorch_does(output, text, tmp_path):
    """`export` proves a file before it keeps it."""
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package)
    proving = ["--text", text, "--samples", 2, "--window", 48]
    code, command_output = run(
        "export", output, "--format", "gguf", "--dtype", "f32", "-o", tmp_path / "out.gguf", *proving
    )
    assert code == 0, command_output
    assert "llama.cpp, f32: KL to PyTorch" in command_output
    assert "computes what PyTorch does, as far as " in command_output


@posix
def test_other_weights_fail(output, text, tmp_path, monkeypatch):
    fork_module(monkeypatch, isolation, tmp_path)
    other = copy_of(output, tmp_path)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    compare = ["--text", text, "--samples", 2, "--window", 48]
    code, message = run("validate", output, "--runtime", "transformers", "--against", other, *compare)
    assert code == 1
    assert "failed: transformers computes something else" in message


def test_a_runtime_that_is_not_installed_is_named_with_the_command_that_installs_it(output, monkeypatch):
    monkeypatch.setattr(proof, "find_spec", lambda _name: None)
    code, message = run("validate", output, "--runtime", "mlx")
    assert code == 2
    assert 'mlx is not installed: pip install ".[mlx]"' in message


def test_vllm_needs_an_environment_of_its_own(output, monkeypatch):
    """pip cannot install it beside this package, which wants a newer transformers."""
    monkeypatch.setattr(proof, "find_spec", lambda _name: None)
    code, message = run("validate", output, "--runtime", "vllm")
    assert code == 2
    assert "-m venv vllm && vllm/bin/pip install vllm click" in message


def test_a_misspelt_runtime_is_guessed(output):
    code, message = run("validate", output, "--runtime", "llamacpp")
    assert code == 2
    assert message.startswith("Error: --runtime: llamacpp is not one of ")
    assert message.endswith(": did you mean 'llama.cpp'?\n")


def test_node_and_its_package_are_asked_for(output, monkeypatch, tmp_path):
    monkeypatch.delenv("NODE_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, message = run("validate", output, "--runtime", "transformers.js")
    assert code == 2
    assert "there is no `node` on PATH: install it" in message
    node = tmp_path / "node"
    node.write_text("#!/bin/sh\nexit 1\n")
    node.chmod(0o755)
    code, message = run("validate", output, "--runtime", "transformers.js")
    assert code == 2
    assert (
        "is in no folder of NODE_PATH: `npm install --prefix NODE @huggingface/transformers`, then set NODE_PATH"
        in message
    )


def test_code_that_is_not_this_packages_is_not_run(output, text, tmp_path):
    copy = copy_of(output, tmp_path)
    (copy / "modeling_pruned.py").write_text("raise SystemExit")
    code, message = run("validate", copy, "--runtime", "transformers", "--text", text)
    assert code == 2
    assert "which is not this package's: say --trust-remote-code" in message


@pytest.mark.parametrize(
    ("name", "auto_map"),
    [
        ("tokenizer_config.json", {"AutoTokenizer": ["planted.Tokenizer", None]}),
        ("processor_config.json", {"AutoProcessor": "planted.Processor"}),
        ("config.json", "planted.Model"),
        ("config.json", {"AutoModelForCausalLM": "someone/else--modeling_pruned.PrunedLlamaForCausalLM"}),
        ("config.json", {"AutoModelForCausalLM": "modeling_pruned.x/y--z.PrunedLlamaForCausalLM"}),
        ("custom_generate/generate.py", None),
    ],
)
@pytest.mark.parametrize("runtime", ["transformers", "vllm"])
def test_no_file_of_a_folder_brings_other_code_into_a_runtime(
    output, text, tmp_path, monkeypatch, name, auto_map, runtime
):
    monkeypatch.setattr(proof, "require_runtime", lambda _runtime: None)
    monkeypatch.setattr(proof, "run_isolated", lambda *_: pytest.fail("it was run"))
    copy = copy_of(output, tmp_path)
    if auto_map is None:
        (copy / name).parent.mkdir()
        (copy / name).write_text("raise SystemExit('planted')")
    else:
        plant(copy, name, auto_map=auto_map)
    code, message = run("validate", copy, "--runtime", runtime, "--text", text)
    assert code == 2
    assert message.endswith("which is not this package's: say --trust-remote-code\n")


@pytest.mark.parametrize("named", ["", {}, [], "../mlx_pruned.py", "sub/../mlx_pruned.py", {"mlx_pruned.py": 1}])
def test_a_model_file_that_is_no_file_of_ours_does_not_reach_mlx(output, text, tmp_path, monkeypatch, named):
    monkeypatch.setattr(proof, "require_runtime", lambda _runtime: None)
    monkeypatch.setattr(proof, "run_isolated", lambda *_: pytest.fail("it was run"))
    copy = copy_of(output, tmp_path)
    plant(copy, "config.json", model_file=named)
    code, message = run("validate", copy, "--runtime", "mlx", "--text", text)
    assert code == 2
    assert message.endswith("which is not this package's: say --trust-remote-code\n")


def test_code_that_is_missing_is_said(output, text, tmp_path):
    copy = copy_of(output, tmp_path)
    (copy / "modeling_pruned.py").unlink()
    code, message = run("validate", copy, "--runtime", "transformers", "--text", text)
    assert code == 2
    assert "has no modeling_pruned.py, which its config.json names" in message


@posix
def test_a_folder_that_a_runtime_cannot_load_is_refused_in_its_words(output, text, tmp_path, monkeypatch):
    fork_module(monkeypatch, isolation, tmp_path)
    copy = copy_of(output, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    del config["auto_map"]
    (copy / "config.json").write_text(json.dumps(config))
    code, message = run("validate", copy, "--runtime", "transformers", "--against", output, "--text", text)
    assert code == 2
    assert "transformers does not run" in message
