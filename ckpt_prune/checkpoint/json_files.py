"""JSON from files of unknown origin, and JSON as this project writes and compares it."""

import json
from codecs import BOM_UTF8
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import Stamp, read_input, stamp_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import CONTROL_CHARACTERS
from ckpt_prune.common.text_encoding import NOT_UTF8

_DEEPEST = 100
"""Levels; no file of this project or of transformers has ten."""
_LOADED = (
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
"""JSON files beside config.json that transformers loads with a model. Copies of the model carry them unchanged."""


class EncodingError(ValueError):
    """A file's bytes are not plain UTF-8. The message completes "FILE is …" and names the remedy."""


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        return parse_json_object(read_input(path))
    except EncodingError as error:
        raise UserError(f"{path} is {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable JSON object ({error}); download or restore the file") from error


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises ValueError with a one-line reason, also for a key that is given twice."""
    value = _parse(data, object_pairs_hook=_refuse_repeated_keys)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} instead of an object")
    _check_depth(value)
    if b"\\u" in data:
        _check_surrogates(value)
    return value


def check_side_files(folder: Path) -> None:
    """Refuse a checkpoint with a JSON file that transformers could not load: copies of the model would carry it."""
    for name in _LOADED:
        path = folder / name
        if path.is_file() and (reason := _find_fault(path, stamp_of(path))):
            raise UserError(f"{path} {reason}")


@lru_cache(maxsize=64)
def _find_fault(path: Path, _stamp: Stamp) -> str | None:
    """Say why a file is no JSON object, or return None. The stamp makes the cache forget files that change."""
    try:
        value = _parse(read_input(path))
    except EncodingError as error:
        return f"is {error}"
    except OSError as error:
        return f"cannot be read ({error.strerror}); restore the file, or remove it"
    except ValueError as error:
        return f"is not valid JSON ({error}); restore the file, or remove it"
    return None if isinstance(value, dict) else "is not a JSON object; restore the file, or remove it"


def _parse(data: bytes, **options: Any) -> Any:
    if data.startswith(BOM_UTF8):
        raise EncodingError("UTF-8 with a byte order mark: save it as UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EncodingError(NOT_UTF8) from error
    if "\0" in text:  # never valid in JSON; UTF-16 without a byte order mark is full of them
        raise EncodingError(NOT_UTF8)
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _check_depth(value: dict[str, Any] | list[Any], levels: int = _DEEPEST) -> None:
    # The parser can read deeper values than most code that walks them, with a frame for every level.
    if not levels:
        raise ValueError("nested too deeply")
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            _check_depth(inner, levels - 1)


def _check_surrogates(value: object) -> None:
    # JSON can write half a surrogate pair, and UTF-8 cannot.
    try:
        canonical_json(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text that is not Unicode: {error.object[error.start : error.end]!a}") from error


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} is given twice")
        result[key] = value
    return result


def canonical_json(value: object) -> str:
    """Write a value in the one spelling that digests use: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def pretty_json(value: object) -> str:
    """Write a value as in checkpoint folders: two spaces, keys in the order given, control characters escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
