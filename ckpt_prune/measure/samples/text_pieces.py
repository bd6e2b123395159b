r"""Where a long text may be cut so that the tokens of the parts are those of the whole.

A tokenizer's library takes a hundred bytes for each token, until the whole text is done. A cut between an ASCII letter
and a line feed changes nothing where, whatever stands around it,

- the normalizer turns characters one by one, or composes them: a line feed composes with nothing;
- no added token has a line feed in it, or takes white space beside it;
- the pre-tokenizer's words end at the cut. Those that cut at white space do; so do the published patterns below: what
  takes a letter takes no line feed after it, and they look ahead alone, not back.

Other tokenizers (those that put something before a text, or merge over the whole of it) get whole texts.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

LONG = 2**20
"""Characters of a part."""

_CUT = re.compile(r"(?<=[A-Za-z])\n")
_LOCAL = {"BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}
_SPACED = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_BY_CHARACTER = {"Digits", "Punctuation"}
"""Cut characters of a kind out, wherever they stand."""
_SHARED = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}@| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    f"(?i:'s|'t|'re|'ve|'m|'ll|'d){_SHARED.replace('@', digits)}"
    for digits in ("", "{1,3}")  # of Qwen 2 and of Llama 3
}


def parts(backend: Any, text: str, long: int = LONG) -> Iterator[str]:
    """Parts of a text, in order, whose tokens are those of the whole text.

    Args:
        backend: the tokenizer, as the tokenizers library has it; None of any other.
        text: the whole.
        long: characters of a part, where there is a place for a cut.
    """
    start = 0
    if len(text) > long and backend is not None and _may_be_cut(json.loads(backend.to_str())):
        while len(text) - start > long and (found := _CUT.search(text, start + long)):
            yield text[start : found.start()]
            start = found.start()
    yield text[start:]


def _may_be_cut(tokenizer: dict[str, Any]) -> bool:
    added = all(
        not (token["lstrip"] or token["rstrip"] or token["single_word"] or "\n" in token["content"])
        for token in tokenizer["added_tokens"]
    )
    return added and _is_local(tokenizer["normalizer"]) and _ends_words(tokenizer["pre_tokenizer"])


def _is_local(step: dict[str, Any] | None) -> bool:
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(_is_local, step["normalizers"]))
    return step["type"] in _LOCAL


def _ends_words(step: dict[str, Any] | None) -> bool:
    """Whether words end where a letter stands before a line feed."""
    if step is None:
        return False
    if step["type"] == "Sequence":
        steps = step["pretokenizers"]
        # What only recodes bytes may stand beside one that does.
        return any(map(_ends_words, steps)) and all(_ends_words(each) or _recodes(each) for each in steps)
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"]) and not step["add_prefix_space"]
    if step["type"] == "Split":
        return step["behavior"] == "Isolated" and not step["invert"] and step["pattern"].get("Regex") in _PATTERNS
    return step["type"] in _SPACED


def _recodes(step: dict[str, Any]) -> bool:
    recoded = step["type"] == "ByteLevel" and not step["use_regex"] and not step["add_prefix_space"]
    return recoded or step["type"] in _BY_CHARACTER
