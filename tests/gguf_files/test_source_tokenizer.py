"""Tokenizers of GGUF files as transformers' own: they split text as llama.cpp does with the file itself."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.llama_cpp import LlamaCppTask, run_llama_cpp
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.source_tokenizer import tokenizer_of
from tests.gguf_files.test_source import edit_file
from tests.gguf_files.tiny import proving, save
from tests.pairs import every

TEXTS = (
    "Hello, it's 1234 ways\n\n  to WON'T",
    "",
    " <s>  two</s>  three <|im_end|>\n four",
    "\u00e9t\u00e9 \u4f60\u597d",
)
WHOLE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
LIKE = (
    *("tekken", *WHOLE, "dbrx", "smaug-bpe", "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt"),
    *("olmo", "jais", "trillion", "granite-docling", "smollm", "starcoder", "refact", "command-r", "codeshell"),
    *("exaone", "minerva-7b", "qwen2", "stablelm2", "deepseek-r1-qwen", "kormo", "megrez", "gpt-4o", "llama4"),
    *("kanana2", "qwen35", "bloom", "poro-chat", "gpt3-finnish", "falcon"),
)
"""Pre-tokenizers that are read."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file with three special tokens more than the demo's model, whose texts llama.cpp knows."""
    folder = save(tmp_path_factory.mktemp("source-tokenizer") / "model", "llama", num_hidden_layers=1)
    export_gguf(str(folder), folder.parent / "plain.gguf", proving(folder), kind="f32", proof=False)
    values = open_gguf(folder.parent / "plain.gguf").values
    tokens, merges, types = (values[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges", "token_type"))
    named = ("<unk>", "<|endoftext|>", "<|im_end|>")
    changed = {"tokens": [*tokens[:-3], *named], "merges": merges[:-3], "token_type": [*types[:-3], 3, 3, 1]}
    assert ["".join(merge.split(" ")) for merge in merges[-3:]] == tokens[-3:]
    keys = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    return edit_file(folder.parent / "plain.gguf", folder.parent / "m.gguf", **keys)


def split_by_llama_cpp(file: Path) -> list[list[int]]:
    task = LlamaCppTask(model=str(file), context=32, texts=list(TEXTS), windows=[[5, 6, 7, 8]], positions=[2])
    return run_llama_cpp(task).tokens


def split_by_output(file: Path, folder: Path) -> list[list[int]]:
    ckpt_prune.convert(file, output=folder, proof=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("pre", every(7, LIKE))
def test_a_pre_tokenizer_splits_text_and_begins_it_as_in_llama_cpp(file, tmp_path, pre):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    changed = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": None}
    changed = edit_file(file, tmp_path / "m.gguf", **changed)
    split = split_by_output(changed, tmp_path / "out")
    assert split == split_by_llama_cpp(changed)
    assert (split[1] == [0]) == (pre in (*WHOLE, "tekken"))
    # Written again, the file says so.
    export_gguf(str(tmp_path / "out"), tmp_path / "again.gguf", proving(tmp_path / "out"), proof=False)
    again = open_gguf(tmp_path / "again.gguf").values
    assert again["tokenizer.ggml.add_bos_token"] == (pre in (*WHOLE, "tekken"))


@pytest.mark.parametrize(
    "keys",
    [
        {"general.name": "Tiny Phi-3"},
        {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None},
        {
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.bos_token_id": None,
            "tokenizer.ggml.add_eos_token": True,
        },
        {"tokenizer.ggml.token_type": None},
        {"tokenizer.ggml.eos_token_id": 40, "tokenizer.ggml.padding_token_id": 41},
    ],
    ids=["strips", "no names", "default begin", "no types", "ordinary end"],
)
def test_what_a_file_leaves_out_is_what_llama_cpp_takes(file, tmp_path, keys):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    changed = edit_file(file, tmp_path / "m.gguf", **keys)
    assert split_by_output(changed, tmp_path / "out") == split_by_llama_cpp(changed)


def test_all_ends_and_all_templates_come_along(file, tmp_path):
    templates = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    ends = {f"tokenizer.ggml.{key}_token_id": place for key, place in (("eot", 7), ("eom", 9), ("fim_sep", 11))}
    changed = edit_file(
        file,
        tmp_path / "m.gguf",
        **{**templates, **ends, "tokenizer.ggml.suppress_tokens": [4, 5], "tokenizer.chat_templates": ["tool_use"]},
    )
    ckpt_prune.convert(changed, output=tmp_path / "out", proof=False)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    # Two more by their texts: <|endoftext|> and <|im_end|>.
    assert generation["eos_token_id"] == [1, 7, 9, 11, 2046, 2047]
    assert generation["suppress_tokens"] == [4, 5]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 1
    named = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert named == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    ckpt_prune.prune(tmp_path / "out", recipe="magnitude", ratio=0.2, output=tmp_path / "pruned")
    assert AutoTokenizer.from_pretrained(tmp_path / "pruned").chat_template == named
    export_gguf(str(tmp_path / "pruned"), tmp_path / "again.gguf", proving(tmp_path / "out"), proof=False)
    assert templates.items() <= open_gguf(tmp_path / "again.gguf").values.items()


def test_a_special_token_that_is_unused_and_tokens_of_another_number_are_refused(file, tmp_path):
    values = dict(open_gguf(file).values)
    types = values["tokenizer.ggml.token_type"]
    unused = {"tokenizer.ggml.token_type": [*types[:40], 5, *types[41:]], "tokenizer.ggml.padding_token_id": 40}
    with pytest.raises(UserError, match=r"m\.gguf: the special token '.*' is one that the file marks as unused"):
        tokenizer_of(values | unused, Path("m.gguf"))
    one_more = [*values["tokenizer.ggml.tokens"], "more"]
    changed = edit_file(
        file, tmp_path / "m.gguf", **{"tokenizer.ggml.tokens": one_more, "tokenizer.ggml.token_type": [*types, 1]}
    )
    with pytest.raises(UserError, match=r"2049 tokens, and token_embd\.weight has 2048 rows"):
        ckpt_prune.convert(changed, output=tmp_path / "out")
