"""Tokenizers: llama.cpp splits text as they do, or they are refused by what it lacks."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_values
from tests.gguf_files.tiny import DEMO, TEXT, proving, save

ROWS = 2048
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def byte_level(folder: Path, expressions: tuple[str, ...], *, ignore_merges: bool = False) -> Path:
    """Train a tokenizer of bytes whose text is split by expressions."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if step == "digits"
        else pre_tokenizers.Split(Regex(step), "isolated")
        for step in expressions
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return keep(folder, tokenizer)


def pieces(folder: Path, *, prefix: bool) -> Path:
    """Train a tokenizer of pieces, with a piece for every byte."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    start = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are no tokens of their own in a text
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return keep(folder, tokenizer)


def keep(folder: Path, tokenizer: Tokenizer) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return folder


CASES = [
    *((steps, name, name in ("llama-bpe", "tekken")) for steps, name in PRE_TOKENIZERS.items()),
    *((steps, "dbrx", False) for steps, name in PRE_TOKENIZERS.items() if name == "llama-bpe"),
]


@pytest.mark.parametrize(("expressions", "name", "ignores"), CASES)
def test_llama_cpp_splits_text_by_the_same_expressions(tmp_path, expressions, name, ignores):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = byte_level(save(tmp_path / "model", "llama"), expressions, ignore_merges=ignores)
    assert tokenizer_values(folder, ROWS)["tokenizer.ggml.pre"] == name
    assert export_gguf(str(folder), tmp_path / "m.gguf", proving(folder)).passed


@pytest.mark.parametrize("prefix", [True, False])
def test_llama_cpp_splits_text_into_the_same_pieces(tmp_path, prefix):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = pieces(save(tmp_path / "model", "llama"), prefix=prefix)
    values = tokenizer_values(folder, ROWS)
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.add_bos_token"]
    assert values["tokenizer.ggml.add_space_prefix"] == prefix
    assert values["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 6, 6]
    assert export_gguf(str(folder), tmp_path / "m.gguf", proving(folder)).passed


def test_special_tokens_templates_and_rows_without_a_token_are_written(tmp_path):
    folder = byte_level(tmp_path / "t", ("digits", *next(iter(PRE_TOKENIZERS))))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    values = tokenizer_values(folder, 710)
    assert values["tokenizer.ggml.tokens"][-1] == "[PAD709]"
    assert values["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert values["tokenizer.ggml.token_type"][-1] == 5
    assert {key: values[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "eot")} == {
        "bos": 0,
        "eos": 1,
        "eot": 7,
    }
    assert values["tokenizer.chat_template"] == TEMPLATE


def demo_with(folder: Path, **changes) -> Path:
    shutil.copytree(DEMO, folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = changes.pop("model", {})
    content |= changes
    content["model"] |= model
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "no normalizer Lowercase"),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "no pre-tokenizer WhitespaceSplit"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}},
            "pre-tokenizer for these expressions is not known: .'a[+]'",
        ),
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
            "no space before a text",
        ),
        ({"model": {"end_of_word_suffix": "</w>"}}, "no tokenizer with end_of_word_suffix"),
    ],
)
def test_what_llama_cpp_lacks_is_named_and_nothing_is_left(tmp_path, changes, says):
    folder = demo_with(tmp_path / "m", **changes)
    with pytest.raises(UserError, match=says):
        export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), proof=False)
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    with pytest.raises(UserError, match="2048 tokens, and the embedding 2000 rows"):
        tokenizer_values(DEMO, 2000)
