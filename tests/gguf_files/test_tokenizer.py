"""Tokenizers: llama.cpp splits text as they do, or they are refused by what it lacks."""

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.source_tokenizer import tokenizer_of
from ckpt_prune.gguf.tokenizer import PRE_TOKENIZERS, read_tokenizer
from tests.gguf_files.test_source import edit_file
from tests.gguf_files.tiny import DEMO, TEXT, WINDOWED, proving, save
from tests.pairs import every

ROWS = 2048
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def byte_level(folder: Path, expressions: tuple[str, ...], *, ignore_merges: bool = False) -> Path:
    """Train a tokenizer of bytes whose text is split by expressions."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    named = {
        "digits": pre_tokenizers.Digits(individual_digits=True),
        "numbers": pre_tokenizers.Digits(individual_digits=False),
        "punctuation": pre_tokenizers.Punctuation("contiguous"),
        "bytes": pre_tokenizers.ByteLevel(False, use_regex=False),
    }
    last = () if "bytes" in expressions else ("bytes",)
    steps = [named.get(step) or pre_tokenizers.Split(Regex(step), "isolated") for step in (*expressions, *last)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
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


def keep(folder: Path, tokenizer: Tokenizer, **tokens: str | None) -> Path:
    named = tokens or {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **named).save_pretrained(folder)
    return folder


def like_qwen(folder: Path) -> Path:
    """Bytes, NFC, no first token, chat tokens behind the vocabulary, two ends, rows without a token."""
    (qwen2,) = (steps for steps, name in PRE_TOKENIZERS.items() if name == "qwen2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(qwen2[0]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    save(folder, "qwen2", bos_token_id=pad, eos_token_id=end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, pad]}))
    return keep(folder, tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def like_gemma(folder: Path) -> Path:
    """Pieces without a space in front, a first token, tokens that are reserved and tokens of markup."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # Of one word or mark each; the tokenizer itself splits no text, for its normalizer leaves no space.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?(\w+|\W)"), "isolated")
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    reserved = ["[multimodal]", "<unused0>", "<unused1>", "<h1>", "▁▁", "▁▁▁"]
    pieces = [*control, *reserved, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=700, special_tokens=pieces, show_progress=False)
    )
    content = json.loads(tokenizer.to_str())
    added = content["added_tokens"][: len(control) + len(reserved)]
    content["added_tokens"] = [token | {"special": token["content"] in control} for token in added]
    # As where pieces were SentencePiece's: every two pieces that make a third are merged, early pieces first.
    ids = content["model"]["vocab"]
    merged = {"▁▁", "▁▁▁", *("".join(pair) for pair in content["model"]["merges"])}
    cuts = [(piece[:at], piece[at:]) for piece in sorted(merged, key=ids.get) for at in range(1, len(piece))]
    content["model"]["merges"] = [list(cut) for cut in cuts if {*cut} <= ids.keys()]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    save(folder, "gemma3_text", **WINDOWED, bos_token_id=2, eos_token_id=1, pad_token_id=0)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 6]}))
    return keep(folder, tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def like_smollm(folder: Path) -> Path:
    """Bytes and single digits, a first token that the text does not get."""
    save(folder, "llama")
    return byte_level(folder, ("digits", next(steps[0] for steps, name in PRE_TOKENIZERS.items() if name == "gpt-2")))


CASES = [
    *((steps, name, name in ("llama-bpe", "tekken")) for steps, name in PRE_TOKENIZERS.items()),
    *((steps, "dbrx", False) for steps, name in PRE_TOKENIZERS.items() if name == "llama-bpe"),
    *(
        (tuple(step.replace(r"\r", "\r").replace(r"\n", "\n") for step in steps), name, False)
        for steps, name in PRE_TOKENIZERS.items()
        if name == "deepseek-v3"
    ),
]


@pytest.mark.parametrize(("expressions", "name", "ignores"), every(4, CASES))
def test_llama_cpp_splits_text_by_the_same_expressions(tmp_path, expressions, name, ignores):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = byte_level(save(tmp_path / "model", "llama"), expressions, ignore_merges=ignores)
    assert read_tokenizer(folder, ROWS).values["tokenizer.ggml.pre"] == name
    assert export_gguf(str(folder), tmp_path / "m.gguf", proving(folder)).passed


@pytest.mark.parametrize("prefix", [True, False])
def test_llama_cpp_splits_text_into_the_same_pieces(tmp_path, prefix):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = pieces(save(tmp_path / "model", "llama"), prefix=prefix)
    values = read_tokenizer(folder, ROWS).values
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.add_bos_token"]
    assert values["tokenizer.ggml.add_space_prefix"] == prefix
    assert values["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 6, 6]
    assert export_gguf(str(folder), tmp_path / "m.gguf", proving(folder)).passed


KEYS = {"model", "tokens", "token_type", "eos_token_id", "add_bos_token", "add_eos_token"}


@pytest.mark.parametrize(
    ("make", "pre", "extra_keys"),
    [
        (like_qwen, "qwen2", {"merges", "pre", "padding_token_id", "bos_token_id", "eot_token_id"}),
        (like_gemma, None, {"scores", "bos_token_id", "padding_token_id", "unknown_token_id", "eot_token_id"}),
        (like_smollm, "smollm", {"merges", "pre", "bos_token_id"}),
    ],
)
def test_a_tokenizer_comes_back_from_a_file_key_by_key(tmp_path, make, pre, extra_keys):
    """Exported, read by `convert` and exported again: every key that is about the tokenizer is as it was."""
    folder = make(tmp_path / "model")
    export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)
    ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "back")
    export_gguf(str(tmp_path / "back"), tmp_path / "again.gguf", proving(folder), kind="f32", proof=False)
    first, second = (
        {key: value for key, value in open_gguf(tmp_path / name).values.items() if key.startswith("tokenizer.")}
        for name in ("m.gguf", "again.gguf")
    )
    named = {key.removeprefix("tokenizer.ggml.") for key in first}
    assert KEYS | extra_keys | {"tokenizer.chat_template"} <= named
    assert first.get("tokenizer.ggml.pre") == (pre or first.get("tokenizer.ggml.pre"))
    assert first["tokenizer.chat_template"] == TEMPLATE
    for key in first.keys() | second.keys():
        assert second.get(key) == first.get(key), key
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "back", folder))
    for text in (
        TEXT[:400].replace("    ", "  "),
        " two  spaces   three\n\n\t12345 ",
        "e\u0301t\u00e9 \U0001f600 \u4f60\u597d",
        "",
        "a<mask>b<|im_end|>",
    ):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    chat = [{"role": "user", "content": "Hi"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)


def test_pieces_that_a_file_lists_merges_of_are_read(tmp_path):
    """Gemma 4's published files: llama.cpp's own converter writes merges, and pieces of spaces as they are."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = like_gemma(tmp_path / "model")
    export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)
    stored = open_gguf(tmp_path / "m.gguf").values
    tokens = [token.replace(" ", "▁") for token in stored["tokenizer.ggml.tokens"]]
    pairs = zip(tokens, stored["tokenizer.ggml.token_type"], strict=True)
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    changes = {
        "model": "gemma4",
        "pre": None,
        "merges": [" ".join(merge) for merge in merges],
        "tokens": tokens,
        "token_type": [1 if {*token} == {"▁"} else kind for token, kind in pairs],
    }
    file = edit_file(
        tmp_path / "m.gguf", tmp_path / "listed.gguf", **{f"tokenizer.ggml.{key}": own for key, own in changes.items()}
    )
    ckpt_prune.convert(file, output=tmp_path / "back")  # llama.cpp splits texts so, too
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "back", folder))
    for text in (
        TEXT[:400],
        " two  spaces   three\n\n\t12345 ",
        "e\u0301t\u00e9 \U0001f600 \u4f60\u597d",
        "a<mask>b\n\n\nx",
    ):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text


PUBLISHED = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<h1>",
    "\n\n",
    "  ",
    "   ",
    *(f"<0x{byte:02X}>" for byte in range(256)),
]
MADE = [
    "th",
    "▁th",
    "▁the",
    "an",
    "▁an",
    "in",
    "▁▁a",
    "the",
    "aa",
    "ana",
    "aaa",
    "a▁",
    "én",
    "x\n",
    "\nx",
    "▁in",
    "ban",
]
LETTERS = [*"▁ \nthenaibxé.,<1>", "\u4f60"]


def make_published_keys() -> dict[str, object]:
    """Keys of a file made from SentencePiece: a piece of text has the score of a token that is no piece of text, and
    the scores have a gap, as in the published file of Gemma 3."""
    tokens = [*PUBLISHED, *MADE, *(letter for letter in LETTERS if letter != " ")]
    types = [3, 3, 3, 3, 4, 4, 4, 4, *[6] * 256, *[1] * (len(tokens) - len(PUBLISHED))]
    piece_scores = [-5.0 - place for place in range(len(MADE))]
    letters = [-40.0 - place for place in range(len(LETTERS) - 1)]
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types,
        "scores": [-7.0] * 8 + [0.0] * 256 + piece_scores + letters,
        **{f"{name}_token_id": place for place, name in enumerate(("padding", "eos", "bos", "unknown"))},
        "add_space_prefix": False,
        "add_bos_token": True,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def by_scores(values: dict[str, object], text: str) -> list[int]:
    """Tokenise as llama.cpp does: whole tokens are cut out, the longest first; then the two neighbours whose piece has
    the highest score are merged, the leftmost if several have; what is left becomes bytes."""
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    ids = {token: index for index, token in enumerate(given["tokens"])}
    parts: list[str | int] = [text]
    special = [token for token, kind in zip(given["tokens"], given["token_type"], strict=True) if kind in (3, 4)]
    for token in sorted(special, key=len, reverse=True):
        cut: list[str | int] = []
        for part in parts:
            pieces = [part] if isinstance(part, int) else part.split(token)
            cut += [piece_or_id for piece in pieces for piece_or_id in (ids[token], piece)][1:]
        parts = cut
    tokens = [given["bos_token_id"]]
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        symbols = list(part.replace(" ", "▁"))
        while True:
            pairs = [(ids.get("".join(pair)), at) for at, pair in enumerate(itertools.pairwise(symbols))]
            scored = [(-given["scores"][index], at) for index, at in pairs if index is not None]
            if not scored:
                break
            at = min(scored)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for symbol in symbols:
            fallback = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            tokens += [ids[symbol]] if symbol in ids else fallback
    return tokens


def test_pieces_of_a_file_are_merged_by_their_scores(tmp_path):
    values = make_published_keys()
    tokenizer = tokenizer_of(values, Path("m.gguf")).tokenizer
    rng = random.Random(0)
    alphabet = [*LETTERS, "\u00df", "\U0001f600", "<h1>", "<eos>", "banana", "\n\n\n", "    "]
    for _ in range(400):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 30)))
        assert tokenizer(text)["input_ids"] == by_scores(values, text), text
    tokenizer.save_pretrained(tmp_path)
    back = read_tokenizer(tmp_path, len(values["tokenizer.ggml.tokens"])).values
    scores, published = (keys.pop("tokenizer.ggml.scores") for keys in (back, values))
    pieces = [index for index, kind in enumerate(values["tokenizer.ggml.token_type"]) if kind == 1]
    assert sorted(pieces, key=scores.__getitem__) == sorted(pieces, key=published.__getitem__)
    assert len({scores[index] for index in pieces}) == len(pieces)
    assert [scores[index] for index in pieces[: len(MADE)]] == [-float(place) for place in range(len(MADE))]
    assert back == values | {"tokenizer.ggml.add_eos_token": False}


def test_scores_that_no_merges_follow_are_refused():
    values = make_published_keys()
    tokens = values["tokenizer.ggml.tokens"]
    for without in ("x", "é"):  # llama.cpp would merge the two halves of a piece, though one is no token
        fewer = [f"<{index}>" if token == without else token for index, token in enumerate(tokens)]
        with pytest.raises(UserError, match=r"m\.gguf: .* has a character that is no token"):
            tokenizer_of(values | {"tokenizer.ggml.tokens": fewer}, Path("m.gguf"))
    scores = values["tokenizer.ggml.scores"]
    scores[len(PUBLISHED) + 1] = scores[len(PUBLISHED)]
    with pytest.raises(UserError, match=r"m\.gguf: 'th' and '▁th' have the same score"):
        tokenizer_of(values, Path("m.gguf"))
    with pytest.raises(UserError, match=f"{len(scores)} tokens have {len(scores) - 1} scores"):
        tokenizer_of(values | {"tokenizer.ggml.scores": scores[:-1]}, Path("m.gguf"))


def test_special_tokens_templates_and_rows_without_a_token_are_written(tmp_path):
    folder = byte_level(tmp_path / "t", ("digits", *next(iter(PRE_TOKENIZERS))))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    values = read_tokenizer(folder, 710).values
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
        read_tokenizer(DEMO, 2000)
