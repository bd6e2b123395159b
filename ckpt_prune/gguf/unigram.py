"""Unigram tokenizers, such as XLM-R's, as llama.cpp has them: pieces with scores, of which it takes the likeliest."""

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.keys import Keys
from ckpt_prune.gguf.pieces import SPACE
from ckpt_prune.gguf.special_tokens import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

MODEL = "t5"
"""llama.cpp's name for such tokenizers."""
_UNLIKELY = -10000.0
"""Score of rows without a token."""


def steps_of(step: Mapping[str, Any] | None, many: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order; `many` is the key of a sequence."""
    if step is None:
        return []
    return [inner for each in step[many] for inner in steps_of(each, many)] if step["type"] == "Sequence" else [step]


def write_unigram(tokenizer: Mapping[str, Any], rows: int, where: Path) -> dict[str, Any]:
    """Return the keys of a file that hold the content of a tokenizer.json with a Unigram model.

    Raises:
        UserError: llama.cpp splits text otherwise; it says what differs.
    """
    model, added = tokenizer["model"], {each["id"]: each for each in tokenizer["added_tokens"] if each["id"] < rows}
    if model.get("byte_fallback"):
        raise UserError(f"{where}: llama.cpp has no Unigram tokenizer that falls back on bytes")
    if len(model["vocab"]) > rows:
        raise UserError(f"{where}: the tokenizer has {len(model['vocab'])} tokens, and the embedding {rows} rows")
    charsmap, one_space = _normalizer(tokenizer, where)
    splits, prefix = _pre_tokenizer(tokenizer, where)
    pieces = [(str(piece), float(score)) for piece, score in model["vocab"]]
    types = [UNKNOWN if index == model.get("unk_id") else NORMAL for index in range(len(pieces))]
    missing = range(len(pieces), rows)
    pieces += [(f"[PAD{index}]", _UNLIKELY) for index in missing]
    types += [UNUSED for _ in missing]
    for index, each in added.items():
        pieces[index] = each["content"], pieces[index][1] if types[index] != UNUSED else 0.0
        if types[index] != UNKNOWN:
            types[index] = CONTROL if each["special"] else USER_DEFINED
    content = {
        "model": MODEL,
        "pre": "default",
        "tokens": [piece for piece, _ in pieces],
        "scores": [score for _, score in pieces],
        "token_type": types,
        "add_space_prefix": prefix,
        "remove_extra_whitespaces": splits or one_space,
    }
    if charsmap:
        content["precompiled_charsmap"] = charsmap
    return {f"tokenizer.ggml.{key}": value for key, value in content.items()}


def _normalizer(tokenizer: Mapping[str, Any], where: Path) -> tuple[bytes, bool]:
    """Return the table of characters and what they become, and whether runs of spaces become one."""
    charsmap, one_space = b"", False
    for step in steps_of(tokenizer.get("normalizer"), "normalizers"):
        pattern = step.get("pattern") or {}
        if step["type"] == "Precompiled":
            charsmap = b64decode(step["precompiled_charsmap"] or "")
        elif step["type"] == "Replace" and pattern.get("Regex") == " {2,}" and step["content"] in (" ", SPACE):
            one_space = True
        elif step["type"] != "Strip":
            raise UserError(f"{where}: llama.cpp has no normalizer {step['type']} for Unigram tokenizers")
    return charsmap, one_space


def _pre_tokenizer(tokenizer: Mapping[str, Any], where: Path) -> tuple[bool, bool]:
    """Return whether texts are split at white space, and whether a space is put before them."""
    splits = prefix = False
    for step in steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "WhitespaceSplit":
            splits = True
        elif step["type"] == "Metaspace" and step.get("replacement") == SPACE:
            prefix = step.get("prepend_scheme", "always") != "never"
        else:
            raise UserError(f"{where}: llama.cpp has no pre-tokenizer {step['type']} for Unigram tokenizers")
    return splits, prefix


def read_unigram(keys: Keys, tokens: list[str], unknown: int | None) -> Tokenizer:
    """Return the tokenizer that a file's keys hold: `write_unigram`, undone."""
    scores = keys.entries("ggml.scores", float)
    if len(scores) != len(tokens):
        raise UserError(f"{keys.where}: {len(tokens)} tokens have {len(scores)} scores; download it again")
    tokenizer = Tokenizer(models.Unigram([*zip(tokens, scores, strict=True)], unk_id=unknown, byte_fallback=False))
    charsmap = keys.entries("ggml.precompiled_charsmap", int, [])
    if charsmap:
        try:
            tokenizer.normalizer = normalizers.Precompiled(bytes(charsmap))
        except Exception as error:  # the library says no more of a damaged table
            raise UserError(
                f"{keys.where}: tokenizer.ggml.precompiled_charsmap is damaged; download it again"
            ) from error
    prefix = "always" if keys.flag("ggml.add_space_prefix", True) else "never"
    split = [pre_tokenizers.WhitespaceSplit()] if keys.flag("ggml.remove_extra_whitespaces", False) else []
    space = pre_tokenizers.Metaspace(SPACE, prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, space])
    tokenizer.decoder = decoders.Metaspace(SPACE, prefix)
    return tokenizer
