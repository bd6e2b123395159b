r"""Cut a long text into pieces whose tokens are those of the whole text.

The tokenizers library takes about a hundred bytes for each token until the whole text is done, so long texts are cut. A
cut between an ASCII letter and a line feed changes no token on three conditions:

- The normalizer changes characters one by one, or composes them: a line feed composes with nothing.
- No added token holds a line feed, or takes the white space beside it.
- Words of the pre-tokenizer end at the cut. They do if it cuts at white space. They also do in the published patterns
  below: no part of these takes a letter and a line feed after it, and they look ahead, never back.

Other tokenizers put something before a text, or merge over the whole of it. Their texts are not cut.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

LONG = 2**20
"""Characters of a piece."""

_CUT = re.compile(r"(?<=[A-Za-z])\n")
_LOCAL_NORMALIZERS = {"BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}
_SPACE_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_CHARACTER_SPLITTERS = {"Digits", "Punctuation"}
"""Cut out characters of a kind, wherever they stand."""
_SHARED = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}@| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    f"(?i:'s|'t|'re|'ve|'m|'ll|'d){_SHARED.replace('@', digits)}"
    for digits in ("", "{1,3}")  # of Qwen 2 and of Llama 3
}


def split_text(backend: Any, text: str, long: int = LONG) -> Iterator[str]:
    """Yield pieces of a text, in order, whose tokens are those of the whole text.

    `backend` is the tokenizer of the tokenizers library; None for any other tokenizer, whose text is not cut. `long` is
    the number of characters of a piece, if there is a place for a cut.
    """
    start = 0
    if len(text) > long and backend is not None and _can_be_cut(json.loads(backend.to_str())):
        while len(text) - start > long and (cut := _CUT.search(text, start + long)):
            yield text[start : cut.start()]
            start = cut.start()
    yield text[start:]


def _can_be_cut(tokenizer: dict[str, Any]) -> bool:
    plain_tokens = all(
        not (token["lstrip"] or token["rstrip"] or token["single_word"] or "\n" in token["content"])
        for token in tokenizer["added_tokens"]
    )
    return plain_tokens and _is_local(tokenizer["normalizer"]) and _ends_words(tokenizer["pre_tokenizer"])


def _is_local(step: dict[str, Any] | None) -> bool:
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(_is_local, step["normalizers"]))
    return step["type"] in _LOCAL_NORMALIZERS


def _ends_words(step: dict[str, Any] | None) -> bool:
    """Return True if words end between a letter and a line feed."""
    if step is None:
        return False
    if step["type"] == "Sequence":
        steps = step["pretokenizers"]
        # A step that only recodes bytes may stand beside one that ends words.
        return any(map(_ends_words, steps)) and all(_ends_words(each) or _recodes(each) for each in steps)
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"]) and not step["add_prefix_space"]
    if step["type"] == "Split":
        return step["behavior"] == "Isolated" and not step["invert"] and step["pattern"].get("Regex") in _PATTERNS
    return step["type"] in _SPACE_SPLITTERS


def _recodes(step: dict[str, Any]) -> bool:
    recodes_bytes = step["type"] == "ByteLevel" and not step["use_regex"] and not step["add_prefix_space"]
    return recodes_bytes or step["type"] in _CHARACTER_SPLITTERS
