"""WordPiece as llama.cpp has it: pieces that begin a word are marked, and not those that go on with one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.special_tokens import CONTROL, NORMAL, UNUSED, USER_DEFINED

SPACE, GOES_ON = "▁", "##"
"""The mark of a piece that begins a word in a file, and of one that goes on with a word in a tokenizer.json."""
_LONGEST = 100
"""Letters of a word from which on tokenizers make one unknown token of it. llama.cpp cuts words of any length."""


def write_pieces(tokenizer: Mapping[str, Any], rows: int, where: Path) -> dict[str, Any]:
    """Return the keys of a file that hold the content of a tokenizer.json of WordPieces.

    Raises:
        UserError: llama.cpp splits text otherwise; it says what differs.
    """
    model, added = tokenizer["model"], {each["id"]: each for each in tokenizer["added_tokens"] if each["id"] < rows}
    steps = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    kinds = [step.get("type") for step in steps]
    if kinds != ["BertNormalizer", "BertPreTokenizer"]:
        raise UserError(f"{where}: llama.cpp splits texts into WordPieces as BERT does, and not by {kinds}")
    if model["continuing_subword_prefix"] != GOES_ON or model["max_input_chars_per_word"] != _LONGEST:
        raise UserError(f"{where}: llama.cpp has WordPieces that go on with {GOES_ON}, in words of {_LONGEST} letters")
    normalizer = steps[0]
    for key in ("clean_text", "handle_chinese_chars"):
        if not normalizer[key]:
            raise UserError(f"{where}: llama.cpp always does what the tokenizer leaves out ({key})")
    vocabulary = {index: token for token, index in model["vocab"].items()}
    if max(vocabulary) >= rows:
        raise UserError(f"{where}: the tokenizer has {max(vocabulary) + 1} tokens, and the embedding {rows} rows")
    tokens, types = [], []
    for index in range(rows):
        if index in added:
            tokens.append(added[index]["content"])
            types.append(CONTROL if added[index]["special"] else USER_DEFINED)
        elif index in vocabulary:
            token = vocabulary[index]
            tokens.append(token.removeprefix(GOES_ON) if token.startswith(GOES_ON) else SPACE + token)
            types.append(NORMAL)
        else:
            tokens.append(f"[PAD{index}]")
            types.append(UNUSED)
    if len(set(tokens)) < rows:
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise UserError(f"{where}: two tokens become {twice!r} in a GGUF file, which marks the beginnings of words")
    strips = normalizer["lowercase"] if normalizer["strip_accents"] is None else normalizer["strip_accents"]
    content = {
        "model": "bert",
        "pre": "default",
        "tokens": tokens,
        "token_type": types,
        "normalizer.lowercase": bool(normalizer["lowercase"]),
        "normalizer.strip_accents": bool(strips),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in content.items()}


def describe_pieces(values: Mapping[str, Any]) -> list[str]:
    """Return a line on the words that llama.cpp splits otherwise; none if a file has no WordPieces."""
    if values["tokenizer.ggml.model"] != "bert":
        return []
    where = [f"words of more than {_LONGEST} letters"]
    if values["tokenizer.ggml.normalizer.strip_accents"]:
        where = ["Hangul, vowel signs with a width of their own (Devanagari, Tamil)", *where]
    return [f"llama.cpp makes other tokens than transformers of {' and '.join(where)}"]


def unmark_pieces(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Return the tokens of a file as a tokenizer.json has them: `write_pieces`, undone."""
    return [
        token if kind != NORMAL else token.removeprefix(SPACE) if token.startswith(SPACE) else GOES_ON + token
        for token, kind in zip(tokens, types, strict=True)
    ]
