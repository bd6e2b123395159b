"""Files of encoders: llama.cpp makes the hidden states and embeddings that PyTorch does, of the same tokens."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import ckpt_prune
from ckpt_prune.checkpoint.sentence_modules import read_modules
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import decimal_bytes
from ckpt_prune.gguf.architectures import ARCHITECTURES
from ckpt_prune.gguf.encoders import pooling_of
from ckpt_prune.gguf.export import export_gguf, validate_gguf
from ckpt_prune.gguf.llama_cpp import LlamaCppTask, run_llama_cpp
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.tokenizer import load_stored_tokenizer, read_tokenizer
from ckpt_prune.model.runtimes import RUNTIMES
from ckpt_prune.runtimes.tokens import HARD_TEXTS, split
from tests.gguf_files.test_stacks import MODELS as STACKS
from tests.gguf_files.tiny import TEXT, WINDOWED, add_pooling, frame_tokens, proving, save, save_pieces, save_unigram
from tests.runner.frontiers import best_of, make_command, read, run

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")

RERANKER = AutoModelForSequenceClassification
BERT = {"num_hidden_layers": 2, "type_vocab_size": 2, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
ROBERTA = BERT | {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
ENCODERS = {
    "bert": ("bert", AutoModelForMaskedLM, BERT | {"intermediate_size": 192}),
    "bert-tanh": ("bert", AutoModel, BERT | {"hidden_act": "gelu_new"}),
    "roberta": ("roberta", AutoModel, ROBERTA),
    "xlm-roberta": ("xlm-roberta", AutoModel, BERT | {"type_vocab_size": 1}),
    "camembert": ("camembert", AutoModel, BERT),
    "distilbert": ("distilbert", AutoModel, BERT),
    "modernbert": (
        "modernbert",
        AutoModelForMaskedLM,
        ROBERTA | {"num_hidden_layers": 4, "local_attention": 16, "initializer_range": 0.4},
    ),
    "nomic_bert": ("nomic_bert", AutoModel, ROBERTA),
    "eurobert": ("eurobert", AutoModel, ROBERTA),
    "gemma-embedding": ("gemma3_text", AutoModel, WINDOWED | {"use_bidirectional_attention": True}),
}
"""Name → family, class, and what its config.json has."""


def save_encoder(folder, name):
    model_type, auto, changes = ENCODERS[name]
    save(folder, model_type, auto, **changes)
    pieces = {"bert": save_pieces, "distilbert": save_pieces, "xlm-roberta": save_unigram, "camembert": save_unigram}
    pieces.get(model_type, frame_tokens)(folder)
    return folder


@pytest.mark.parametrize("name", list(ENCODERS))
def test_an_encoder_makes_the_same_hidden_states_and_embeddings(name, tmp_path):
    folder = save_encoder(tmp_path / "model", name)
    add_pooling(folder, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.passed, exported.proof
    assert exported.proof.allowed == (1e-5 if exported.architecture in ("bert", "gemma-embedding") else 1e-9)
    assert exported.proof.pooling == "cls"
    made = ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "back", text=proving(folder).text)
    assert made.notes[1].startswith("the file does not say how many tokens of a text its model takes (here ")
    assert [module.kind for module in read_modules(tmp_path / "back")] == ["Transformer", "Pooling", "Normalize"]
    assert pooling_of(tmp_path / "back")[0] == pooling_of(folder)[0]
    again, stored = (load_stored_tokenizer(each) for each in (tmp_path / "back", folder))
    for text in (*HARD_TEXTS, "A  ab\tAb½ return<mask>", "été"):
        assert split(again, text) == split(stored, text)
    assert validate_gguf(exported.path, str(tmp_path / "back"), proving(folder)).passed


@pytest.mark.parametrize("name", ["xlm-roberta", "bert"])
def test_a_reranker_gives_the_same_scores(name, tmp_path):
    """Tokens of the second text of a BERT may have no type of their own."""
    folder = save(tmp_path / "model", name, RERANKER, num_labels=1, **BERT | {"type_vocab_size": 1})
    (save_unigram if name == "xlm-roberta" else save_pieces)(folder)
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert (exported.passed, exported.proof.pooling) == (True, "rank"), exported.proof
    assert exported.proof.pooled[0] < 1e-5
    assert not any("left out" in note for note in exported.notes)
    with pytest.raises(UserError, match="pooling_type is '4', and no class with a head is made of it"):
        ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "back", proof=False)


def test_modules_dense_of_embeddinggemma_are_in_its_file(tmp_path):
    folder = save_encoder(tmp_path / "model", "gemma-embedding")
    add_pooling(folder, dense=48, pooling_mode_mean_tokens=True)
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.passed, exported.proof
    assert exported.proof.pooled[0] < 1e-5
    assert not any("left out" in note for note in exported.notes)
    file = open_gguf(tmp_path / "m.gguf")
    assert file.tensors["dense_2.weight"].shape == (48, 32)
    assert file.values["gemma-embedding.dense_3_feat_in"] == 48
    with pytest.raises(UserError, match="dense_2_feat_out is '48', and no modules Dense are made of it"):
        ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "back", proof=False)
    settings = folder / "2_Dense" / "config.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("Identity", "Tanh"), encoding="utf-8")
    exported = export_gguf(str(folder), tmp_path / "other.gguf", proving(folder), kind="f32", proof=False)
    assert exported.notes == ("Dense and Dense of modules.json are left out: embeddings are what the pooling makes",)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_a_decoder_that_makes_embeddings_pools_its_last_token(auto, tmp_path):
    """Qwen3-Embedding is such a model: its tokenizer ends texts with another token than `eos`, and it has no head."""
    folder = save(tmp_path / "model", "qwen3", auto, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True)
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [(token, stored.token_to_id(token)) for token in ("return",)]
    stored.post_processor = processors.TemplateProcessing(single="$A return", special_tokens=ends)
    stored.save(str(folder / "tokenizer.json"))
    add_pooling(folder, pooling_mode_lasttoken=True)
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert (exported.passed, exported.proof.pooling, exported.proof.allowed) == (True, "last", 1e-9)
    values = open_gguf(tmp_path / "m.gguf").values
    assert values["tokenizer.ggml.eos_token_id"] == ends[0][1]
    made = ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "back", text=proving(folder).text)
    assert (made.proof.passed, pooling_of(tmp_path / "back")) == (True, pooling_of(folder))
    if auto is AutoModel:
        data = ["--text", proving(folder).text[0], "--samples", 4, "--window", 32]
        recipe = ["--recipe", "ridge", "--ratio", 0.3, "--for", "llama.cpp", "--set", "export.format=gguf"]
        recipe += ["--set", "export.dtype=q8_0", "--set", "export.rounding=gptq", "--evaluate-samples", 0]
        code, output = run("prune", folder, *recipe, *data, "-o", tmp_path / "out")
        assert code == 0, output
        assert sum(map(int, re.findall(r"(\d+) by (?:error feedback|importance)", output))) == 14
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}', encoding="utf-8")
        with pytest.raises(UserError, match=r"qwen3: llama\.cpp does not pool by max"):
            export_gguf(str(folder), tmp_path / "m2.gguf", proving(folder), kind="f32", proof=False)


def test_what_llama_cpp_pools_otherwise_or_leaves_out_is_said(tmp_path):
    folder = save_encoder(tmp_path / "model", "bert")
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)
    assert exported.notes[:3] == (
        "left out: cls.predictions.bias and 6 more (llama.cpp makes embeddings of the last hidden states, not of a "
        "head's output)",
        "no modules.json names a pooling: llama.cpp gives a vector for each token, or pools by --pooling",
        "llama.cpp approximates GELU by tanh, which is 5e-4 off at most, as much as its table rounds",
    )
    add_pooling(folder, pooling_mode=["max", "mean"])
    assert pooling_of(folder) == (None, ["llama.cpp does not pool by max and mean: it gives a vector for each token"])


def test_pruned_heads_and_columns_are_filled_up(tmp_path):
    """The same weights are rounded by what reaches them, and a file of another model fails."""
    folder = save_encoder(tmp_path / "model", "bert-tanh")
    data = ["--text", proving(folder).text[0], "--samples", 4, "--window", 32, "--evaluate-samples", 0]
    sizes = ["--recipe", "flap-global", "--ratio", 0.3, "--container", "any"]
    code, output = run("prune", folder, *sizes, *data, "-o", tmp_path / "out")
    assert code == 0, output
    exported = export_gguf(str(tmp_path / "out"), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.passed, exported.proof
    assert any("filled up with zeros" in note for note in exported.notes)
    code, output = run("quantize", folder, "--format", "gguf", "--type", "q8_0", *data, "-o", tmp_path / "q.gguf")
    assert code == 0, output
    assert "matrices are rounded by what reaches them" in output
    code, output = run("validate", tmp_path / "q.gguf", "--against", tmp_path / "out", *data[:-2])
    assert code == 1
    assert "are not the checkpoint's, rounded" in output


@pytest.mark.parametrize(
    ("auto", "changes", "says"),
    [
        (AutoModelForTokenClassification, {}, "BertForTokenClassification answers by a head, and GGUF files are"),
        (RERANKER, {"num_labels": 1}, "every token has type 0 there, and here tokens of the second text have type 1,"),
        (RERANKER, {"num_labels": 3, "type_vocab_size": 1}, "a head gives one score of two texts there, and here 3"),
        (AutoModel, {"hidden_act": "relu"}, "'gelu_new' or 'gelu_fast' or 'gelu', and config.json has 'relu'"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(auto, changes, says, tmp_path):
    folder = save(tmp_path / "model", "bert", auto, **BERT | changes)
    save_pieces(folder)
    with pytest.raises(UserError, match=says):
        export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)


@pytest.mark.parametrize(
    ("pools", "target", "prunes"),
    [
        (True, ["--target-bytes", "118KB"], True),  # types alone do not make a file so small
        (False, ["--target-bytes", "130KB"], False),
    ],
)
def test_a_size_is_kept_to_and_its_loss_is_that_of_the_embeddings(pools, target, prunes, tmp_path):
    pytest.importorskip("libgguf")
    pytest.importorskip("sentence_transformers")
    folder = save_encoder(tmp_path / "model", "bert")
    if pools:
        add_pooling(folder, word_embedding_dimension=64, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "held_out.txt").write_text(TEXT[::-1])
    code, output = run(*make_command(tmp_path, "out", *target, samples=8, window=48))
    assert code == 0, output
    found = read(tmp_path, "out")
    best, file = best_of(found), tmp_path / "out" / "model.gguf"
    assert file.stat().st_size == best["bytes"] <= 1000 * float(target[1][:-2])
    assert bool(best["pruned"]) == prunes
    assert 0.2 < best["kl"] / best["predicted_kl"] < 5
    assert (best["ranks"] is None, found["loss"]) == (not pools, "lost energy")
    assert "llama-embedding -m model.gguf" in (tmp_path / "out" / "README.md").read_text()
    # The cosine, by hand: of short texts in their first token, or of windows in every token.
    tokenizer, model = load_stored_tokenizer(folder), AutoModel.from_pretrained(folder)
    windows = torch.tensor(tokenizer(TEXT[::-1], add_special_tokens=False)["input_ids"])[:96].view(2, 48)
    texts = tokenizer.batch_decode(windows.view(-1, 24), skip_special_tokens=True) if pools else []

    def compare(file, ids):
        answer = run_llama_cpp(LlamaCppTask(model=str(file), context=64, windows=ids, states=not pools, pooled=pools))
        with torch.no_grad():
            states = [model(input_ids=torch.tensor([each])).last_hidden_state[0] for each in ids]
        theirs = torch.stack([each[0] for each in states] if pools else states).double()
        ours = torch.from_numpy(answer.pooled if pools else answer.states).double()
        return float(torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).mean())

    ids = tokenizer(texts, truncation=True, max_length=48)["input_ids"] if pools else windows.tolist()
    assert best["kl"] == pytest.approx(2 * (1 - compare(file, ids)), rel=1e-3)
    if not pools:  # `prune` makes it at once, and measures the file, not the weights beside it
        data = ["--text", tmp_path / "text.txt", "--samples", 8, "--window", 48, "--choose", "first"]
        data += ["--evaluate", tmp_path / "held_out.txt", "--evaluate-samples", 2]
        code, output = run("prune", folder, *data, *target, "--for", "llama.cpp", "-o", tmp_path / "small")
        assert code == 0, output
        assert "predicted loss of the hidden states' energy" in output
        assert not re.search("takes nothing away|nothing of any space", output)
        (made,) = (tmp_path / "small").glob("*.gguf")
        assert made.stat().st_size <= best["bytes"] + 1024
        loss = json.loads((tmp_path / "small" / "ckpt_prune.json").read_text())["loss"]
        ends = tokenizer.cls_token_id, tokenizer.sep_token_id
        framed = [[ends[0], *each, ends[1]] for each in windows.flatten()[:92].view(2, 46).tolist()]
        assert loss["after"] == pytest.approx(compare(made, framed), abs=1e-6)
        assert loss["data"].endswith(f"of {made.name} ({decimal_bytes(made.stat().st_size)}) in llama.cpp")
        texts = ["--text", tmp_path / "held_out.txt", "--samples", 2, "--window", 48]
        code, output = run("evaluate", tmp_path / "small", "--against", folder, *texts)
        assert f"keeps the figures of {made.name}: these are of the weights beside it" in " ".join(output.split())
        assert json.loads((tmp_path / "small" / "ckpt_prune.json").read_text())["loss"] == loss
        code, output = run(*make_command(tmp_path, "late", "--target-latency", "50%@128", samples=8, window=48))
        assert code == 2
        assert "model makes embeddings, and times in llama.cpp are of models that generate text: ask for a" in output


@pytest.mark.parametrize("normalizer", [{"lowercase": False}, {"lowercase": True}, {"strip_accents": False}])
def test_word_pieces_are_split_alike(normalizer, tmp_path):
    folder = save_encoder(tmp_path / "model", "bert")
    save_pieces(folder, **normalizer)
    export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f16", proof=False)
    texts = ["Hello HELLO hellooo", "été Été ETE", "a[CLS]b [MASK] x", "naïve-naive", "def f(x):\treturn x**2", "你a"]
    answer = run_llama_cpp(LlamaCppTask(model=str(tmp_path / "m.gguf"), context=16, texts=texts, states=True))
    tokenizer = load_stored_tokenizer(folder)
    assert answer.tokens == [split(tokenizer, text) for text in texts]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "llama.cpp splits texts into WordPieces as BERT does, and not by"),
        ({"normalizer": {"type": "BertNormalizer", "clean_text": False}}, "llama.cpp always does what the tokenizer"),
        ({"post_processor": None}, "llama.cpp puts .CLS. and .SEP. around every text"),
    ],
)
def test_word_pieces_that_llama_cpp_splits_otherwise_are_refused(changes, says, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_pieces(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if isinstance(changes.get("normalizer"), dict):
        changes = {"normalizer": content["normalizer"] | changes["normalizer"]}
    (folder / "tokenizer.json").write_text(json.dumps(content | changes), encoding="utf-8")
    with pytest.raises(UserError, match=says):
        read_tokenizer(folder, 256, encodes=True)


def test_all_encoders_are_run_and_named_among_runtimes():
    named = {each.model_type for each in ARCHITECTURES if each.encodes}
    run = {model_type for model_type, *_ in (*ENCODERS.values(), *STACKS.values())}
    assert named == run == {*RUNTIMES["llama.cpp"].encoders}
