"""Files whose matrices are rounded by what reaches them, in every architecture's order of rows."""

import json
import re

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import OtherTypes
from ckpt_prune.gguf import fitting
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.fitting import _Matrices
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.types import is_matrix
from ckpt_prune.model.containers.opening import open_model
from tests.gguf_files.test_families import MULTIPLIERS
from tests.gguf_files.tiny import DELTA, FALCON_H1, GRANITE, proving, save
from tests.pairs import choose_cases

pytest.importorskip("libgguf", reason="ggml's functions are not installed: pip install libgguf")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),  # rows of q and k are reordered
        ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "intermediate_size": 100}),
        ("apertus", {}),  # a file lists numbers of its activation among its keys
        ("phi3", {"intermediate_size": 100}),  # fused, and filled up
        ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 64}),
        ("granitemoe", GRANITE | {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 36}),
        ("falcon_h1", FALCON_H1 | MULTIPLIERS),  # parts of rows have factors of their own
        ("qwen3_5_text", DELTA | {"layer_types": ["linear_attention", "full_attention"]}),  # heads are reordered
    ],
)
def test_weights_of_the_file_are_put_back_where_they_are_from(tmp_path, model_type, changes):
    model = open_model(str(save(tmp_path / "model", model_type, **SIZES | changes)))
    matrices, layout = _Matrices(model, "q4_0"), lay_out(model, "q4_0")
    tensors = model.checkpoint.read(list(model.checkpoint.tensors))
    matrices.now.update(tensors)
    cleared = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    weights: dict[str, torch.Tensor] = {}
    for name, weight in layout.tensors.items():
        whole = weight.read().float()
        if is_matrix(name, weight):
            weights |= zip(matrices.matrices(name), whole if whole.ndim == 3 else [whole], strict=True)
    for name, weight in weights.items():
        place = matrices.place(name)
        torch.testing.assert_close(matrices.read(name).float(), weight)
        place.put_back(cleared, weight)
        # What the matrix makes of inputs with this Gram is as large as what the checkpoint's rows make of it.
        half = torch.randn(tensors[place.parts[0].source].shape[1], 8, dtype=torch.float64)
        gram, rows = (
            half @ half.T,
            torch.cat(
                [tensors[part.source][part.source_rows].double() * place.factor[part.rows] for part in place.parts]
            ),
        )
        energy = float((rows @ gram * rows).sum())
        placed_gram = place.place_gram(gram)
        assert float((weight.double() @ placed_gram * weight.double()).sum()) == pytest.approx(energy, rel=1e-5)
    for name in {source for each in weights for source in matrices.place(each).sources}:
        torch.testing.assert_close(cleared[name], tensors[name].float())


@pytest.mark.parametrize("tied", choose_cases([True, False], bool))
def test_quantize_writes_a_file_that_llama_cpp_runs_and_that_holds_the_model(tmp_path, tied):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    model = save(tmp_path / "model", "llama", **SIZES, tie_word_embeddings=tied)
    text = proving(model).text[0]
    data = ["--text", text, "--window", 48, "--samples", 16, "--evaluate-samples", 2]
    others = ["--embedding-type", "iq4_nl", "--tensor-type", "attn_v=q8_0"]
    given = ["quantize", model, "--format", "gguf", "--type", "q4_0", *others, *data]
    code, output = run(*given, "-o", tmp_path / "fit.gguf", "--json")
    assert code == 0, output
    fitted = json.loads(output[output.index("{") :])
    ways = re.findall(r"(\d+) by (error feedback|importance)", fitted["notes"][-1])
    assert sum(int(count) for count, _ in ways) == 15
    assert "error feedback" in dict(map(reversed, ways))
    assert fitted["validation"]["kl"] < 1
    types = OtherTypes("iq4_nl", matrices={"attn_v": "q8_0"})
    planned = FilePlanner(open_model(str(model))).plan("q4_0", types, weighted=True, fitted=True)
    assert fitted["bytes"] == planned.bytes == (tmp_path / "fit.gguf").stat().st_size
    kinds = {name: tensor.kind.name for name, tensor in open_gguf(tmp_path / "fit.gguf").tensors.items()}
    assert [kinds[f"blk.0.attn_{each}.weight"] for each in "vq"] == ["Q8_0", "Q4_0"]
    code, output = run("validate", tmp_path / "fit.gguf", "--against", model, "--text", text, "--window", 48)
    assert code == 0, output
    again = tmp_path / "again.gguf"
    assert run(*given, "-o", again)[0] == 0
    assert again.read_bytes() == (tmp_path / "fit.gguf").read_bytes()


@pytest.mark.parametrize("room", [True, False])
def test_every_expert_is_rounded_by_what_reaches_it(tmp_path, monkeypatch, room):
    """By importance alone if the Grams of all take too much memory."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 64}
    model = save(tmp_path / "model", "granitemoe", **SIZES | experts)
    if not room:
        monkeypatch.setattr(fitting, "_MOST_GRAMS", 0)
    data = ["--text", proving(model).text[0], "--window", 48, "--samples", 16, "--evaluate-samples", 2]
    code, output = run("quantize", model, "--format", "gguf", "--type", "q4_0", *data, "-o", tmp_path / "m.gguf")
    assert code == 0, output
    ways = {way: int(count) for count, way in re.findall(r"(\d+) by (error feedback|importance)", output)}
    assert sum(ways.values()) == 2 * (4 + 3 * 3) + 1
    assert (ways["error feedback"] > 9) == room
    exported = open_gguf(tmp_path / "m.gguf")
    dense, nearest = lay_out(open_model(str(model)), "q4_0"), tmp_path / "nearest.gguf"
    assert run("export", model, "--format", "gguf", "--dtype", "q4_0", "--no-validate", "-o", nearest)[0] == 0
    name = "blk.1.ffn_down_exps.weight"
    own, plain, source = exported.read(name), open_gguf(nearest).read(name), dense.tensors[name].read()
    assert not torch.equal(own, plain)
    assert float((own - source).norm() / source.norm()) < 0.3


def test_a_recipe_rounds_its_file_by_its_own_samples_so_that_types_of_two_bits_work(tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "tie_word_embeddings": True}
    model = save(tmp_path / "model", "llama", **wide)
    text = proving(model).text[0]
    recipe = ["--recipe", "flap-global", "--ratio", 0.3, "--text", text, "--samples", 4, "--window", 48]
    for name, more in (("nearest", ""), ("gptq", ", rounding: gptq")):
        export = f"export={{format: gguf, dtype: iq2_xs{more}}}"
        code, output = run("prune", model, *recipe, "--set", export, "-o", tmp_path / name, "--evaluate-samples", 0)
        assert code == 0, output
        assert "matrices are rounded by what reaches them behind the rounded blocks: " in output
        assert (tmp_path / name / "model-iq2_xs.gguf").is_file(), output
    kinds = {tensor.kind.name for tensor in open_gguf(tmp_path / "gptq" / "model-iq2_xs.gguf").tensors.values()}
    assert "IQ2_XS" in kinds
    first, second = (open_gguf(tmp_path / name / "model-iq2_xs.gguf") for name in ("nearest", "gptq"))
    assert not np.array_equal(first.read("token_embd.weight"), second.read("token_embd.weight"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "gguf", "--text", __file__], "--format gguf needs --type, such as q4_k_m"),
        (["--format", "gguf", "--type", "q4_0"], "--format gguf rounds by what reaches each matrix: give --text"),
        (["--format", "int4", "--type", "q4_0"], "--type does not go with --format int4"),
        (["--format", "gguf", "--type", "q4_0", "--group-size", 32], "--group-size does not go with --format gguf"),
        (["--format", "gguf", "--type", "q4_0", "--text", __file__, "-o", "m"], "a name that ends in .gguf"),
    ],
)
def test_options_that_say_nothing_are_refused(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    model = save(tmp_path / "model", "llama", **SIZES)
    code, output = run("quantize", model, *options, *([] if "-o" in options else ["-o", "m.gguf"]))
    assert (code, says in output) == (2, True), output


def test_a_file_by_feedback_that_fails_names_the_command_that_makes_it(tmp_path, monkeypatch):
    """A plain export would round it in another way."""
    model = save(tmp_path / "model", "llama", **SIZES)
    text = proving(model).text[0]
    chosen = "{format: gguf, dtype: q4_0, rounding: gptq, types: {ffn_up: q8_0}}"
    words = ["--recipe", "ridge", "--ratio", 0.3, "--text", text, "--samples", 4, "--window", 48]

    def fail(*_, **__):
        raise UserError("no room")

    monkeypatch.setattr("ckpt_prune.stages.export.gguf_file.export_gguf", fail)
    out = tmp_path / "out"
    code, output = run("prune", model, *words, "--set", f"export={chosen}", "-o", out, "--evaluate-samples", 0)
    assert code != 0
    data = f"--text {text} --samples 4 --window 48 --seed 0"
    kept = f"ckpt-prune quantize {out} --format gguf --type q4_0 --tensor-type ffn_up=q8_0 {data} -o "
    assert f"{kept}{out / 'model-q4_0-mix.gguf'}" in output
