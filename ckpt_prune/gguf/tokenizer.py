"""The tokenizer of a checkpoint as GGUF keeps it: tokens, types, scores or merges, and what is added to a text.

llama.cpp has its own tokenizers. One that it does not have is refused, by name: a file must not read text differently.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.pieces import SPACE, describe_pieces, write_pieces
from ckpt_prune.gguf.special_tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Flags,
    describe_ends,
    find_stops,
    name_ends,
)
from ckpt_prune.gguf.unigram import steps_of, write_unigram
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.runtimes.tokens import HARD_TEXTS, split

_ADDED_SCORE = -1000.0
_CONFIGS = ("config.json", "generation_config.json")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
PRE_TOKENIZERS: Mapping[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    ("digits", _GPT2): "smollm",
    (r"\p{N}", _GPT2): "smollm",
    (_LLAMA3,): "llama-bpe",
    (_LLAMA3.replace("{1,3}", ""),): "qwen2",
    (_QWEN35,): "qwen35",
    (_GPT4O,): "gpt-4o",
    (_TEKKEN,): "tekken",
    _DEEPSEEK: "deepseek-v3",
    (_BLOOM,): "bloom",
    _FALCON: "falcon",
    # As Falcons are published. It also cuts between a space and a digit, and bytes that as characters are numbers.
    ("punctuation", _GPT2, "bytes", "numbers", _FALCON[2]): "falcon",
}
"""Expressions that split a text, in their order → the name under which llama.cpp has them.

A word is a step without an expression: single digits, runs of punctuation or of numbers. "bytes" stands where bytes
become characters if steps follow.
"""


CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "It's 12 o'clock."},
        {"role": "user", "content": "And now?"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
)
"""Conversations that fill a chat template, where it takes them."""


@dataclass(frozen=True)
class FileTokenizer:
    """The tokenizer of a checkpoint as a GGUF file has it.

    Attributes:
        values: keys of the file.
        name: under which the file is known. llama.cpp chooses rules for some tokens by it.
        ends: at which llama.cpp ends a text as `generate` does.
        notes: what llama.cpp does otherwise, a line each.
    """

    values: Mapping[str, Any]
    name: str
    ends: tuple[int, ...]
    notes: tuple[str, ...]


def load_stored_tokenizer(folder: Path, used: Any = None) -> Any:
    """Load the tokenizer that a folder's tokenizer.json describes, as llama.cpp's own converter reads it.

    Some classes of transformers, such as LlamaTokenizer, put steps of their own in the place of those in the file.

    Args:
        used: what `load_tokenizer` returns, if it is loaded already.
    """
    used = used or load_tokenizer(folder)
    if type(used) is PreTrainedTokenizerFast or not (folder / "tokenizer.json").is_file():
        return used
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def fill_chats(tokenizer: Any) -> dict[int, str]:
    """Return the prompts that a tokenizer's chat template makes of `CHATS`, by their places; it may refuse some."""
    filled: dict[int, str] = {}
    for place, messages in enumerate(CHATS if tokenizer.chat_template else ()):
        with suppress(TemplateError, ValueError, TypeError):
            filled[place] = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return filled


def find_frame(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether a tokenizer puts its first and its last token around a text."""
    plain, framed = (split(tokenizer, "a", framed=each) for each in (False, True))
    first, last = _frame_tokens(tokenizer)
    start = framed[:1] == [first] != plain[:1]
    end = framed[-1:] == [last] != plain[-1:]
    if framed[start : len(framed) - end] != plain:
        raise UserError("llama.cpp puts no tokens around a text other than the first and last of a sequence")
    return start, end


def _frame_tokens(tokenizer: Any) -> tuple[int | None, int | None]:
    """Return the tokens that may be put around a text: the last is the one that is (Qwen3-Embedding has its own)."""
    plain, framed = (split(tokenizer, "a", framed=each) for each in (False, True))
    last = framed[-1] if framed[-1:] != plain[-1:] else None
    return _first(tokenizer.bos_token_id, tokenizer.cls_token_id), _first(
        last, tokenizer.eos_token_id, tokenizer.sep_token_id
    )


def read_tokenizer(folder: Path, rows: int, *, encodes: bool = False) -> FileTokenizer:
    """Return the tokenizer of a checkpoint folder as a GGUF file has it.

    Args:
        folder: of the checkpoint.
        rows: of the embedding. Added tokens beyond them are left out, and rows without a token are named [PADn].
        encodes: the model makes embeddings, and ends no text; tokens of encoders may be WordPieces.

    Raises:
        UserError: llama.cpp has no such tokenizer; what it lacks is named.
    """
    used: Any = load_tokenizer(folder)
    tokenizer = load_stored_tokenizer(folder, used)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"{folder}: llama.cpp has no tokenizer like {type(tokenizer).__name__}")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    others = {"Unigram": write_unigram} | ({"WordPiece": write_pieces} if encodes else {})
    values = others.get(content["model"]["type"], _content)(content, rows, folder)
    config, generation = (read_json_object(file) if file.is_file() else {} for file in map(folder.joinpath, _CONFIGS))
    stated = _ends(generation if "eos_token_id" in generation else config)
    ends = [] if encodes else [end for end in stated if end < rows]
    first, last = _frame_tokens(tokenizer)
    ids = {
        "bos": _first(first, config.get("bos_token_id")),
        "eos": _first(last, config.get("eos_token_id"), *ends),
        "unknown": tokenizer.unk_token_id,
        "padding": _first(tokenizer.pad_token_id, config.get("pad_token_id")),
    }
    if encodes:
        named = {"cls": tokenizer.cls_token_id, "seperator": tokenizer.sep_token_id, "mask": tokenizer.mask_token_id}
        ids |= {key: None if index is None or index >= rows else index for key, index in named.items()}
    ids |= name_ends(ends, ids["eos"], values["tokenizer.ggml.tokens"])
    for key, index in ids.items():
        if index is not None and 0 <= index < rows:
            values[f"tokenizer.ggml.{key}_token_id"] = int(index)
        elif index is not None and key in ("bos", "eos"):
            raise UserError(f"{folder}: {key}_token_id is {index}, and the embedding has {rows} rows")
    try:
        start, end = find_frame(tokenizer)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    if not (start and end) and values["tokenizer.ggml.model"] == "bert":
        raise UserError(f"{folder}: llama.cpp puts {tokenizer.cls_token} and {tokenizer.sep_token} around every text")
    values |= {"tokenizer.ggml.add_bos_token": start, "tokenizer.ggml.add_eos_token": end}
    if encodes and end and (separator := tokenizer.sep_token_id) is not None:  # of two texts that a reranker reads
        pair = list(tokenizer("a", "a", verbose=False)["input_ids"])
        behind = len(split(tokenizer, "a", framed=True))
        values["tokenizer.ggml.add_sep_token"] = pair[behind - 1 : behind + 1] == [separator, separator]
    template = tokenizer.chat_template
    if isinstance(template, dict) and "default" not in template:
        raise UserError(f"{folder}: none of the chat templates is named default: {', '.join(template)}")
    for name, text in (template if isinstance(template, dict) else {"default": template} if template else {}).items():
        values["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = text
    flags = Flags(content, values)
    file_name = flags.choose_name(model_name(folder).rpartition("/")[2], str(config.get("model_type")))
    prompts = [*fill_chats(tokenizer).values()]
    try:
        strips = flags.check(file_name, prompts)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    stops = set() if encodes else find_stops(values)
    notes = (
        *(describe_pieces(values) if encodes else describe_ends(values, ends)),
        *strips,
        *_differences(used, tokenizer, prompts, start=start, end=end),
    )
    return FileTokenizer(values, file_name, tuple(end for end in ends if end in stops), notes)


def _ends(config: Mapping[str, Any]) -> list[int]:
    """Return the tokens at which `generate` ends a text, by a generation_config.json or config.json."""
    ends = config.get("eos_token_id")
    every = ends if isinstance(ends, list) else [ends]
    return [end for end in every if isinstance(end, int) and not isinstance(end, bool) and end >= 0]


def _differences(used: Any, tokenizer: Any, prompts: list[str], *, start: bool, end: bool) -> Iterator[str]:
    """Yield lines on what transformers does otherwise with a text, or a filled chat template, than llama.cpp."""
    if type(used) is not type(tokenizer):
        other = next((text for text in (*HARD_TEXTS, *prompts) if split(used, text) != split(tokenizer, text)), None)
        if other is not None:
            yield (
                f"transformers' {type(used).__name__} splits {other[:40]!r} into other tokens than tokenizer.json, "
                "which the file follows, as llama.cpp does"
            )
    if start and any(split(tokenizer, prompt, framed=False)[:1] != [tokenizer.bos_token_id] for prompt in prompts):
        yield f"llama.cpp begins chats with {tokenizer.bos_token}, which apply_chat_template leaves out"
    if end and prompts:
        yield f"llama.cpp ends every prompt with {tokenizer.eos_token}, those of chats too"


def _first(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int)), None)


def _content(tokenizer: Mapping[str, Any], rows: int, where: Path) -> dict[str, Any]:
    """Keys that hold the content of a tokenizer.json."""
    model, added = tokenizer["model"], {each["id"]: each for each in tokenizer["added_tokens"] if each["id"] < rows}
    if model["type"] != "BPE":
        raise UserError(f"{where}: llama.cpp has no {model['type']} tokenizer for models that generate text")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(f"{where}: llama.cpp has no tokenizer with {key} ({model[key]!r})")
    vocabulary = {index: token for token, index in model["vocab"].items()}
    if max(vocabulary) >= rows:
        raise UserError(f"{where}: the tokenizer has {max(vocabulary) + 1} tokens, and the embedding {rows} rows")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    has_pieces = model.get("byte_fallback")
    types = {index: _piece_type(token, model) if has_pieces else NORMAL for index, token in vocabulary.items()}
    for index, each in added.items():
        special = each["special"] or _looks_special(each["content"])
        types[index] = CONTROL if special else USER_DEFINED
    tokens = [
        added[index]["content"] if index in added else vocabulary.get(index, f"[PAD{index}]") for index in range(rows)
    ]
    if has_pieces:
        tokens = [
            token.replace(SPACE, " ") if types.get(i) == USER_DEFINED else token for i, token in enumerate(tokens)
        ]
        own_text = {vocabulary[index] for index, kind in types.items() if kind == NORMAL}
        scores = _scores(sorted(own_text, key=model["vocab"].__getitem__), merges)
        content = {
            "model": "llama",
            "pre": "default",
            "add_space_prefix": _puts_space_first(tokenizer, where),
            "scores": [_score(types.get(i), scores.get(token, 0.0)) for i, token in enumerate(tokens)],
        }
    else:
        content = {
            "model": "gpt2",
            "pre": _pre_tokenizer(tokenizer, where),
            "add_space_prefix": False,
            "merges": merges,
        }
    content |= {"tokens": tokens, "token_type": [types.get(index, UNUSED) for index in range(rows)]}
    return {f"tokenizer.ggml.{key}": value for key, value in content.items()}


def _pre_tokenizer(tokenizer: Mapping[str, Any], where: Path) -> str:
    """The name of the expressions that split a text into words."""
    for step in steps_of(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] != "NFC":  # llama.cpp leaves it out of all tokenizers, as of those of Qwen
            raise UserError(f"{where}: llama.cpp has no normalizer {step['type']} for this kind of tokenizer")
    expressions: list[str] = []
    in_bytes = False
    for step in steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if in_bytes and "bytes" not in expressions:
            expressions.append("bytes")
        if step["type"] == "ByteLevel":
            in_bytes = True
            if step.get("add_prefix_space"):
                raise UserError(f"{where}: llama.cpp puts no space before a text (ByteLevel with add_prefix_space)")
            expressions += [_GPT2] if step.get("use_regex", True) else []
        elif step["type"] == "Digits":
            expressions.append("digits" if step.get("individual_digits") else "numbers")
        elif step["type"] == "Punctuation" and step["behavior"] == "Contiguous":
            expressions.append("punctuation")
        elif step["type"] == "Split" and step["behavior"] in ("Isolated", "Removed"):
            pattern = step["pattern"].get("Regex") or step["pattern"]["String"]
            expressions.append(pattern.replace("\r", r"\r").replace("\n", r"\n"))  # some have the characters themselves
        else:
            raise UserError(f"{where}: llama.cpp has no pre-tokenizer {step['type']}")
    name = PRE_TOKENIZERS.get(tuple(expressions))
    if name is None or not in_bytes:
        raise UserError(f"{where}: llama.cpp's pre-tokenizer for these expressions is not known: {expressions}")
    return "dbrx" if name == "llama-bpe" and not tokenizer["model"].get("ignore_merges") else name


def _puts_space_first(tokenizer: Mapping[str, Any], where: Path) -> bool:
    """Whether a tokenizer of pieces puts a space before a text."""
    prefix = False
    for step in steps_of(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            prefix = True
        elif step["type"] != "Replace" or step["pattern"].get("String") != " " or step["content"] != SPACE:
            raise UserError(f"{where}: llama.cpp has no normalizer {step['type']} for this kind of tokenizer")
    for step in steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace" and step.get("replacement") == SPACE:
            prefix = step.get("prepend_scheme", "always") in ("first", "always")
        elif step["type"] != "Split" or step["pattern"].get("String") != " ":
            raise UserError(f"{where}: llama.cpp has no pre-tokenizer {step['type']} for this kind of tokenizer")
    return prefix


def _piece_type(token: str, model: Mapping[str, Any]) -> int:
    if token == model.get("unk_token"):
        return UNKNOWN
    return BYTE if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else NORMAL


def _score(kind: int | None, score: float) -> float:
    return score if kind in (NORMAL, UNKNOWN, BYTE) else _ADDED_SCORE


def _scores(pieces: list[str], merges: Iterable[str]) -> dict[str, float]:
    """Scores with which llama.cpp merges in the order of `merges`: minus the place of each piece.

    SentencePiece numbers pieces in the order in which it made them, and scores them by that. Where the pieces stand in
    the order of their merges, those are the scores; else pieces that no merge makes come last.
    """
    first: dict[str, int] = {}
    for merge in merges:
        first.setdefault("".join(cut_merge(merge)), len(first))
    places = [first[piece] for piece in pieces if piece in first]
    if places != sorted(places):
        pieces = sorted(pieces, key=lambda piece: first.get(piece, len(first)))
    return {piece: -float(place) for place, piece in enumerate(pieces)}


def cut_merge(merge: str) -> tuple[str, str]:
    middle = merge.find(" ", 1)
    return merge[:middle], merge[middle + 1 :]


def _looks_special(token: str) -> bool:
    """Whether llama.cpp's own converter takes a token for a control token, whatever tokenizer.json says."""
    named = token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or token.startswith("<unused")
    return named or any(
        token.startswith(start) and token.endswith(start[::-1].replace("<", ">")) for start in ("<|", "<｜")
    )
