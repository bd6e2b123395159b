"""`export --format gguf`, `validate FILE.gguf` and `convert FILE.gguf`, as people call them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckpt_prune.cli.main import main
from ckpt_prune.gguf import llama_cpp
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.runtimes.comparison import choose_windows, reference_logs
from tests.gguf_files.test_source import edit_file
from tests.gguf_files.tiny import proving, save


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("commands") / "model", "llama", tie_word_embeddings=True)


def test_a_file_is_written_proven_validated_and_read_back(model, tmp_path, monkeypatch):
    """A token that follows need not be likely for its probability to be known without all others."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    predict = llama_cpp._predict
    monkeypatch.setattr(llama_cpp, "TOP", 64)
    monkeypatch.setattr(llama_cpp, "_predict", lambda *given: predict(*given) if given[2] == 64 else [])
    text, file = proving(model).text[0], tmp_path / "m.gguf"
    compare = ["--text", text, "--samples", 2, "--window", 48]
    code, output = run("export", model, "--format", "gguf", "--dtype", "f16", "-o", file, *compare)
    assert code == 0, output
    assert "llama.cpp computes what PyTorch does, as far as f16 can\nllama, f16, " in output
    code, output = run("validate", file, "--runtime", "llama.cpp", "--against", model, *compare, "--json")
    assert code == 0, output
    proof = json.loads(output)
    assert proof["passed"]
    assert proof["kl"] < proof["allowed"] == 1e-3
    assert proof["perplexity"][0] == pytest.approx(proof["perplexity"][1], rel=1e-3)
    code, output = run("convert", file, "-o", tmp_path / "back", "--text", text, "--window", 48, "--json")
    assert code == 0, output
    assert json.loads(output)["validation"]["passed"]
    code, output = run("validate", file, "--against", tmp_path / "back", *compare)
    assert code == 0, output
    other = save(tmp_path / "other", "llama", tie_word_embeddings=True, rms_norm_eps=0.1)
    code, output = run("validate", file, "--against", other, *compare)
    assert code == 1
    assert "failed: llama.cpp computes something else" in output
    content = file.read_bytes()
    file.write_bytes(content[:-96] + bytes(64) + content[-32:])
    code, output = run("validate", file, "--against", model, *compare)
    assert code == 1
    assert "is damaged, or was made from another one" in output
    file.write_bytes(content[:-500])
    code, output = run("validate", file, "--against", model, *compare)
    assert code == 2
    assert "lies outside the file" in output


def test_a_file_of_a_pruned_model_is_held_to_the_dense_one_too(model, tmp_path, monkeypatch):
    """It computes what its own model does, and that is no good model."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    monkeypatch.chdir(tmp_path)
    dense, compare = tmp_path / "model", ["--text", proving(model).text[0], "--samples", 2, "--window", 48]
    shutil.copytree(model, dense)
    code, output = run("prune", dense, "--recipe", "magnitude", "--ratio", 0.5, "-o", "out")
    assert code == 0, output
    how = ["export", "out", "--format", "gguf", "--dtype", "f32", *compare]
    code, output = run(*how, "-o", "beside.gguf")
    assert code == 0, output
    lines = output.splitlines()
    passed = lines.index("llama.cpp computes what PyTorch does, as far as f32 can")
    chosen = choose_windows(dense, proving(model).model_copy(update={"samples": 2, "window": 48}), trust=False)
    perplexities = [
        float((-reference_logs(Path(folder), chosen, trust=False).gather(-1, chosen.actual[..., None]).mean()).exp())
        for folder in ("out", dense)
    ]
    first = f"perplexity {perplexities[0]:.4g} for {perplexities[1]:.4g}, KL "
    assert lines[passed - 1].startswith(f"beside model, on {chosen.actual.numel()} positions of ")
    assert first in lines[passed - 1]
    verdict = r"the output is (much worse than|hardly of use beside) model( by its first choices)?: "
    assert re.match(verdict + re.escape(first), lines[passed + 1])
    assert [loss["against"] for loss in validated(tmp_path / "beside.gguf", compare)["losses"]] == ["out", "model"]
    dense.rename("elsewhere")
    code, output = run(*how, "-o", "alone.gguf")
    assert code == 0, output
    assert "not compared with the dense model: model lies neither beside the model, nor here, nor in" in output
    code, output = run(*how, "-o", "named.gguf", "--dense", "elsewhere")
    assert code == 0, output
    assert "beside elsewhere, on " in output
    shutil.copy("alone.gguf", "out/model.gguf")  # where recipes write it: it is compared with the weights beside it
    code, output = run("validate", "out", *compare, "--json")
    assert [loss["against"] for loss in json.loads(output)["losses"]] == ["out"]
    losses = validated(tmp_path / "alone.gguf", [*compare, "--dense", "elsewhere"])["losses"]
    assert [loss["against"] for loss in losses] == ["out", "elsewhere"]
    assert losses[1]["before"] == pytest.approx(perplexities[1])
    code, output = run("validate", "alone.gguf", "--against", "out", "--dense", "elsewhere", "--max-loss-dense", "1%")
    assert (code, "--max-loss-dense goes with onnxruntime" in output) == (2, True)
    (tmp_path / "model").mkdir()
    shutil.copytree(save(tmp_path / "another", "llama"), dense, dirs_exist_ok=True)
    code, output = run(*how, "-o", "other.gguf")
    assert "not compared with the dense model: model lies neither" in output


def validated(file: Path, compare: list[object]) -> dict[str, Any]:
    code, output = run("validate", file, "--against", "out", *compare, "--json")
    assert code == 0, output
    proof: dict[str, Any] = json.loads(output)
    return proof


def test_without_llama_cpp_the_file_is_refused_with_the_command_that_installs_it(model, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda _name: None)
    code, output = run("export", model, "--format", "gguf", "-o", tmp_path / "m.gguf")
    assert code == 2
    assert 'pip install ".[llamacpp]"' in output
    assert not list(tmp_path.iterdir())
    code, output = run("export", model, "--format", "gguf", "-o", tmp_path / "m.gguf", "--no-validate")
    assert code == 0, output
    assert "not compared with PyTorch" in output
    # All that a command needs is named at once: of sentence encoders what makes their embeddings, too.
    monkeypatch.setattr("ckpt_prune.gguf.find_spec", lambda _name: None)
    shutil.copytree(model, tmp_path / "encoder")
    (tmp_path / "encoder" / "modules.json").write_text("[]")
    (tmp_path / "held_out.txt").write_text("Another text.")
    size = ["--text", proving(model).text[0], "--target-bytes", "100KB", "-o", tmp_path / "out"]
    for command, more in (["frontier"], ["--held-out", tmp_path / "held_out.txt"]), (["prune"], ["--for", "llama.cpp"]):
        code, output = run(*command, tmp_path / "encoder", *size, *more)
        assert (code, output.splitlines()[-1]) == (
            2,
            "Error: not installed: gguf, libgguf, xllamacpp, sentence_transformers: "
            'pip install ".[llamacpp,embed]" in the checkout of ckpt-prune',
        )


def test_a_file_that_computes_something_else_is_not_kept(model, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    monkeypatch.setattr("ckpt_prune.gguf.layout.GgufWeight.pair_neighbours", lambda weight, *_sizes, back: weight)
    code, output = run("export", model, "--format", "gguf", "-o", tmp_path / "m.gguf", "--text", proving(model).text[0])
    assert code == 1
    assert "nothing is written to" in output
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def file(model):
    place = model.parent / "plain.gguf"
    assert run("export", model, "--format", "gguf", "--dtype", "f32", "-o", place, "--no-validate")[0] == 0
    return place


def test_a_checkpoint_that_computes_something_else_than_its_file_is_not_kept(file, model, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    monkeypatch.setattr("ckpt_prune.gguf.layout.GgufWeight.pair_neighbours", lambda weight, *_sizes, back: weight)
    given = ("convert", file, "-o", tmp_path / "out", "--text", proving(model).text[0], "--window", 48)
    code, output = run(*given)
    assert code == 1
    assert output.endswith(
        "failed: llama.cpp computes something else\n"
        f"nothing is written to {tmp_path / 'out'}; --no-validate leaves the comparison out\n"
    )
    assert not list(tmp_path.iterdir())
    code, output = run(*given, "--json")
    assert (code, json.loads(output)["written"]) == (1, False)
    code, output = run("convert", file, "-o", tmp_path / "out", "--no-validate")
    assert code == 0, output
    assert f"not compared with llama.cpp; `ckpt-prune validate {file} --against OUT` compares them" in output


def test_a_conversion_that_is_not_compared_says_why(file, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda _name: None)
    code, output = run("convert", file, "-o", tmp_path / "out")
    assert code == 0, output
    assert output.startswith("not compared with llama.cpp, which is not installed: pip install")
    monkeypatch.undo()
    monkeypatch.setattr("ckpt_prune.gguf.source.has_runtime", lambda: True)
    monkeypatch.setattr("ckpt_prune.gguf.source.available_bytes", lambda: 1000)
    code, output = run("convert", file, "-o", tmp_path / "out", "--overwrite")
    assert code == 0, output
    assert " of memory where 1.00 KB are free; elsewhere `ckpt-prune validate " in output


def test_what_is_compared_on_goes_with_a_file(model, tmp_path):
    code, output = run("convert", model, "-o", tmp_path / "out", "--window", 48)
    assert (code, "is no GGUF file: nothing is compared on" in output) == (2, True)


@pytest.mark.parametrize(
    "command", ["prune", "evaluate", "inspect", "calibrate", "quantize", "plan", "verify", "export"]
)
@pytest.mark.parametrize("place", ["file", "folder", "named after its digest"])
def test_a_command_that_is_given_a_file_names_convert(file, tmp_path, command, place):
    given = tmp_path / {"file": "m.gguf", "folder": "m/m.gguf"}.get(place, "sha256-0123")
    given.parent.mkdir(exist_ok=True)
    given.write_bytes(file.read_bytes())
    options = {
        "quantize": ["--format", "int8", "-o", "out"],
        "export": ["-o", "out"],
        "calibrate": ["-o", "out", "--text", __file__],
    }
    options["prune"] = ["--recipe", "magnitude", "-o", "out"]
    options["evaluate"] = ["--text", __file__]
    code, output = run(command, given.parent if place == "folder" else given, *options.get(command, []))
    assert code == 2
    named = f"{given} is a GGUF file: `ckpt-prune convert {given} -o {given.stem}-checkpoint` makes a checkpoint of it"
    assert named in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"general.architecture": "openelm"}, "openelm is not converted"),
        ({"llama.expert_count": 4}, "llama.expert_count is '4', and no class of transformers is known to compute that"),
        ({"llama.feed_forward_length": [48] * 5 + [32]}, "its blocks differ (feed_forward_length)"),
    ],
)
def test_a_command_that_is_given_a_file_which_convert_refuses_says_why_and_does_not_name_it(
    file, tmp_path, keys, reason
):
    given = edit_file(file, tmp_path / "m.gguf", **keys)
    code, output = run("convert", given, "-o", tmp_path / "out")
    assert (code, reason in output) == (2, True), output
    text = ["--text", __file__]
    for command in (["inspect", given], ["evaluate", given, *text], ["compare", given, given, *text]):
        code, output = run(*command)
        assert (code, output) == (
            2,
            f"Error: {given} is a GGUF file, and `convert` makes no checkpoint of it ({reason}): give the checkpoint "
            f"that it was made from; `ckpt-prune validate {given} --against MODEL` compares the file with it\n",
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--format", "gguf", "--dtype", "int8", "-o", "m.gguf"],
            "int8 does not go with --format gguf: take f32",
        ),
        (["--format", "gguf", "--opset", 20, "-o", "m.gguf"], "--opset does not go with --format gguf"),
        (["--format", "gguf", "--provider", "cpu", "-o", "m.gguf"], "--provider does not go with --format gguf"),
        (["--format", "gguf", "--dtype", "f16", "--dtype", "f32", "-o", "m.gguf"], "a GGUF file has one --dtype"),
        (["--dtype", "f16", "-o", "m"], "--dtype f16 is a type of GGUF files: add --format gguf, or take fp32, fp16"),
        (["--dtype", "q4_k_m", "-o", "m"], "--dtype q4_k_m is a type of GGUF files: add --format gguf"),
        (["--embedding-type", "q4_0", "-o", "m"], "--embedding-type goes with --format gguf"),
        (["--format", "gguf", "--embedding-type", "q4_k", "-o", "m.gguf"], "--embedding-type q4_k has blocks of 256"),
        (["--format", "gguf", "--output-type", "q8_0", "-o", "m.gguf"], "give --embedding-type q8_0"),
        (["--tensor-type", "attn=q4_0", "-o", "m"], "--tensor-type goes with --format gguf"),
        (["--format", "gguf", "--tensor-type", "attn", "-o", "m.gguf"], "attn is no PATTERN=TYPE"),
        (["--format", "gguf", "--tensor-type", "attn=q9", "-o", "m.gguf"], "--tensor-type"),
        (["--format", "gguf", "--tensor-type", "(=q4_0", "-o", "m.gguf"], "( is no regular expression"),
        (["--format", "gguf", "--tensor-type", "no_such=q4_0", "-o", "m.gguf"], "matches no matrix of the file"),
        (["-o", "m.gguf"], "-o m.gguf ends in .gguf: add --format gguf"),
        (["--format", "gguf", "-o", "m"], "a name that ends in .gguf"),
    ],
)
def test_options_of_the_other_format_are_refused(model, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, output = run("export", model, *arguments)
    assert code == 2
    assert says in output
    assert not list(tmp_path.iterdir())


def test_a_file_is_only_replaced_when_asked_and_if_it_is_a_gguf_file(model, tmp_path):
    place = tmp_path / "m.gguf"
    place.write_text("mine")
    code, output = run("export", model, "--format", "gguf", "-o", place, "--no-validate")
    assert (code, "exists; --overwrite replaces it, or choose another name" in output) == (2, True)
    code, output = run("export", model, "--format", "gguf", "-o", place, "--no-validate", "--overwrite")
    assert (code, "is no GGUF file, and is not replaced" in output) == (2, True)
    assert place.read_text() == "mine"


def test_a_recipe_ends_in_a_file_beside_the_weights(model, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    out, text = tmp_path / "out", proving(model).text[0]
    recipe = ["--recipe", "flap-global", "--ratio", 0.3, "--text", text, "--samples", 4, "--window", 48]
    export = ["--set", "export={format: gguf, dtype: q8_0, embedding_type: q5_0, types: {attn_v: f16, attn: q8_0}}"]
    code, output = run("prune", model, *recipe, *export, "-o", out, "--dry-run")
    assert (code, "to be exported: gguf, q8_0" in output) == (0, True), output
    code, output = run("prune", model, *recipe, *export, "-o", out)
    assert code == 0, output
    assert "\nno limit is put on what q8_0 with an embedding of q5_0 loses: it is measured\n" in output
    assert "\ndeci, q8_0, " in output
    tensors = open_gguf(out / "model-q8_0.gguf").tensors
    assert [tensors[f"{name}.weight"].kind.name for name in ("token_embd", "blk.0.attn_v")] == ["Q5_0", "F16"]
    assert run("verify", out)[0] == 0
    (out / "model-q8_0.gguf").unlink()
    code, output = run("prune", model, *recipe, *export, "-o", out, "--resume", "--json")
    assert code == 0, output
    proof = json.loads(output[output.index("{") :])["gguf"]["validation"]
    assert proof["passed"]
    assert [loss["against"] for loss in proof["losses"]] == ["out", "model"]
    assert (out / "model-q8_0.gguf").is_file()
    code, output = run("prune", model, *recipe, "-o", out, "--overwrite")
    assert code == 0, output
    assert not (out / "model-q8_0.gguf").exists()


def test_a_recipe_that_llama_cpp_cannot_end_is_refused_before_pruning_and_a_file_that_fails_leaves_the_output(
    model, tmp_path, monkeypatch
):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    out, text = tmp_path / "out", proving(model).text[0]
    ends = ["--text", text, "--samples", 4, "--window", 48, "--set", "export.format=gguf", "-o", out]
    code, output = run("prune", model, "--recipe", "svd-llm", *ends)
    assert (code, "llama.cpp does not take outputs" in output) == (2, True), output
    assert not list(tmp_path.iterdir())
    code, output = run("prune", model, "--recipe", "magnitude", "--ratio", 0.3, *ends, "--set", "export.dtype=int8")
    assert (code, "export.dtype" in output or "int8 does not go with" in output) == (2, True), output
    monkeypatch.setattr("ckpt_prune.gguf.layout.GgufWeight.pair_neighbours", lambda weight, *_sizes, back: weight)
    code, output = run("prune", model, "--recipe", "magnitude", "--ratio", 0.3, *ends)
    assert (code, "nothing is written to" in output) == (1, True), output
    assert not list(out.glob("*gguf*"))
    assert run("verify", out)[0] == 0
