"""Files of encoders with a decoder: llama.cpp predicts what PyTorch does, of the same tokens."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoModelForTextEncoding, T5ForTokenClassification

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.export import export_gguf, validate_gguf
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.tokenizer import load_stored_tokenizer
from ckpt_prune.runtimes.tokens import split
from tests.gguf_files.tiny import ABSENT, proving, save, save_unigram
from tests.runner.frontiers import run

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")

T5 = dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"), ABSENT
) | {
    **{"vocab_size": 128, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_heads": 4, "num_layers": 2},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1},
    **dict.fromkeys(("max_position_embeddings", "initializer_range", "tie_word_embeddings"), ABSENT),
}
GATED = {"feed_forward_proj": "gated-gelu"}
MODELS = {
    "t5": ("t5", AutoModelForSeq2SeqLM, {"num_decoder_layers": 3}),
    "t5-v1.1": ("t5", AutoModelForSeq2SeqLM, GATED | {"tie_word_embeddings": False}),
    "mt5": ("mt5", AutoModelForSeq2SeqLM, GATED),
    "umt5": ("umt5", AutoModelForSeq2SeqLM, {}),
    "t5-encoder": ("t5", AutoModelForTextEncoding, {}),
}
"""Name → family, class, and what its config.json has."""


def save_stacks(folder, name, **changes):
    model_type, auto, own = MODELS[name]
    save(folder, model_type, auto, **T5 | own | changes)
    save_unigram(folder)
    tensors = load_file(folder / "model.safetensors")
    if name == "t5":  # as the first are published, with what no class reads
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(32, 4)
    if name == "t5-v1.1":  # its head has weights of its own, of which transformers 5.24 makes none
        tensors["lm_head.weight"] = torch.randn(tensors["shared.weight"].shape) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if name == "t5-v1.1":
        text = (folder / "config.json").read_text().replace('embeddings": true', 'embeddings": false')
        (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize("name", list(MODELS))
def test_a_file_computes_what_pytorch_does_and_becomes_a_checkpoint_again(name, tmp_path):
    folder = save_stacks(tmp_path / "model", name)
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.passed, exported.proof
    assert exported.architecture == ("t5encoder" if "encoder" in name else "t5")
    assert any("blocks of zeros" in note for note in exported.notes) == (name == "t5")
    file = open_gguf(exported.path)
    assert exported.proof.divergence < 1e-9 or "enc.blk.0.ffn_gate.weight" in file.tensors
    assert ("output.weight" in file.tensors) == (name == "t5-v1.1")
    made = ckpt_prune.convert(exported.path, output=tmp_path / "back", text=proving(folder).text)
    assert made.proof.passed, made.proof
    assert validate_gguf(exported.path, str(tmp_path / "back"), proving(folder)).passed
    tokenizers = [load_stored_tokenizer(each) for each in (folder, tmp_path / "back")]
    assert split(tokenizers[0], "def  A½ b<mask>") == split(tokenizers[1], "def  A½ b<mask>")


def test_both_pruned_stacks_end_in_a_file_and_another_model_fails(tmp_path):
    """Columns are multiples of what a type wants, and between two stacks of other widths a file is foreseen, too."""
    folder = save_stacks(tmp_path / "model", "t5-v1.1", d_kv=16, d_ff=128)
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"source": "def ab " * (i + 1), "target": "return n" + " re" * i} for i in range(8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = ["--recipe", "ridge", "--ratio", 0.3, "--for", "llama.cpp:q8_0", "--set", "export.format=gguf"]
    data = ["--data", pairs, "--evaluate-samples", 0]
    code, output = run("prune", folder, *recipe, "--set", "export.dtype=q8_0", *data, "-o", tmp_path / "out")
    assert code == 0, output
    assert "llama.cpp computes what PyTorch does, as far as q8_0 can" in output
    file = open_gguf(tmp_path / "out" / "model-q8_0.gguf")
    assert file.values["t5.feed_forward_length"] == 96
    assert file.tensors["dec.blk.1.ffn_gate.weight"].shape == (96, 32)
    code, output = run("export", tmp_path / "out", "--format", "gguf", "-o", tmp_path / "m.gguf", *data[:2])
    assert code == 0, output
    code, output = run("validate", tmp_path / "m.gguf", "--against", folder, *data[:2])
    assert (code, "llama.cpp computes something else" in output) == (1, True), output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"feed_forward_proj": "gated-silu"}, "it computes feed_forward_proj 'relu' or 'gated-gelu', and config.json"),
        ({"relative_attention_max_distance": 64}, "it computes relative_attention_max_distance 128, and config.json"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes, says, tmp_path):
    folder = save_stacks(tmp_path / "model", "t5", **changes)
    with pytest.raises(UserError, match=says):
        export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)


def test_another_head_is_refused(tmp_path):
    folder = save(tmp_path / "model", "t5", T5ForTokenClassification, **T5)
    save_unigram(folder)
    with pytest.raises(UserError, match="T5ForTokenClassification answers by a head, and GGUF files of t5 are"):
        export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)


def test_no_size_is_chosen_of_an_encoder_that_is_rounded_to_nearest(tmp_path):
    folder = save_stacks(tmp_path / "model", "t5-encoder")
    data = ["--text", proving(folder).text[0], "--held-out", folder / "config.json"]
    code, output = run("frontier", folder, *data, "--target-bytes", "50%", "-o", tmp_path / "out")
    assert code == 2
    assert "model is written as t5encoder, whose matrices are rounded to nearest: no size is chosen for" in output
