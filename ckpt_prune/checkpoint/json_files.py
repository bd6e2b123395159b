"""JSON from files nobody vouches for, and JSON as this project writes and compares it."""

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import CONTROL_CHARACTERS

_DEEPEST = 100
"""Levels; no file of this project or of transformers has ten."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises UserError where it cannot be read, is not JSON or is not an object."""
    try:
        return parse_json_object(read_input(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable JSON object ({error}); download or restore the file") from error


def parse_json_object(data: bytes) -> dict[str, Any]:
    """The JSON object in UTF-8 `data`. Raises ValueError with a one-line reason, also for a key given twice."""
    if data.startswith(BOM_UTF8):
        raise ValueError("it begins with a byte order mark: save it as UTF-8 without one")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} instead of an object")
    _check_depth(value)
    if b"\\u" in data:
        _check_text(value)
    return value


def _check_depth(value: object) -> None:
    """Refuse what the parser can read and little else can: whoever walks it needs a frame for every level."""
    level = [value]
    for _ in range(_DEEPEST):
        inside: list[object] = []
        for each in level:
            inside += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        level = [each for each in inside if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError("nested too deeply")


def _check_text(value: object) -> None:
    """Refuse halves of surrogate pairs, which JSON can write and UTF-8 cannot."""
    try:
        canonical_json(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text that is not Unicode: {error.object[error.start : error.end]!a}") from error


def canonical_json(value: object) -> str:
    """One spelling per value, for digests: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def pretty_json(value: object) -> str:
    """As written into checkpoint folders: two spaces, keys in the order given, a final newline.

    What a terminal would obey stands escaped in strings, and JSON has nothing of it elsewhere.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return CONTROL_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} is given twice")
            seen.add(key)
    return result
