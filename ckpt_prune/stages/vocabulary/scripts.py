"""The writing system of a token: latin, cyrillic, han and so on, by the names that Unicode gives its letters."""

import unicodedata
from functools import cache

COMMON, OTHER = "common", "other"
"""Of tokens without a letter, which every text may use; of parts of characters that belong to no one script."""
SCRIPTS = (
    *("latin", "greek", "cyrillic", "armenian", "georgian", "hebrew", "arabic", "syriac", "ethiopic", "devanagari"),
    *("bengali", "gurmukhi", "gujarati", "oriya", "tamil", "telugu", "kannada", "malayalam", "sinhala", "thai", "lao"),
    *("tibetan", "myanmar", "khmer", "mongolian", "han", "hiragana", "katakana", "hangul", "bopomofo", "yi"),
    *("cherokee", "thaana", "nko", "canadian", "tifinagh", "javanese", "balinese"),
)
"""Scripts that can be asked for."""
_LIKE = {"cjk": "han", "ideographic": "han", "kangxi": "han"}
_FORMS = ("fullwidth", "halfwidth")


@cache
def script_of_character(character: str) -> str:
    """Return the script of a letter, `common` of all that is none, `other` of a letter of a rarer script."""
    if unicodedata.category(character)[0] not in "LM":
        return COMMON
    first, *more = unicodedata.name(character, "").lower().replace("-", " ").split() or [""]
    if first in _FORMS and more:
        first = more[0]
    first = _LIKE.get(first, first)
    if first in SCRIPTS:
        return first
    # Signs above letters of any script, and letters that stand for themselves in formulas.
    return COMMON if first in ("combining", "modifier", "mathematical", "feminine", "masculine", "micro") else OTHER


def script_of_text(text: str) -> str:
    """Return the script of the first letter of a text that has one; `common` if none has."""
    return next((script for each in text if (script := script_of_character(each)) != COMMON), COMMON)


def script_of_bytes(data: bytes) -> str:
    """Return the script of UTF-8 bytes, which may begin or end inside a character.

    A cut-off end counts as the first character that begins with those bytes.
    """
    try:
        return script_of_text(data.decode())
    except UnicodeDecodeError:
        pass
    text = data.decode(errors="ignore")
    if (script := script_of_text(text)) != COMMON:
        return script
    for length in (1, 2, 3):
        tail = data[-length:]
        if tail[0] >= 0xC2:
            size = 2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4
            # 0xE0 and 0xF0 need a larger second byte; 0xA0 is one for both.
            character = tail + bytes([0xA0] * (size - length))
            first = character.decode(errors="ignore")
            return script_of_text(first) if first else OTHER
    return OTHER
