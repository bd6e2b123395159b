"""Decoding of text files that others wrote, and the rows of JSON in them."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import say_once

ROW_SUFFIXES = (".jsonl", ".json", ".ndjson")
"""Endings of files of rows; upper case counts too."""
TEXT_FILE = ".txt, .jsonl, .ndjson or .json file"
"""Files that text is read from, for messages and help."""
ENCODINGS = "UTF-8, or UTF-16 or UTF-32 with a byte order mark"
"""How they may be encoded."""
_MARKS = (  # UTF-32's first: UTF-16's begins it
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks and the encodings that they announce."""
_UNPACK = "unpack it first"
REWRITE = 'write its texts as .jsonl, one {"text": "…"} a line'
_OTHER_FORMATS = (
    (b"\x1f\x8b", "compressed by gzip", _UNPACK),
    (b"BZh", "compressed by bzip2", _UNPACK),
    (b"\xfd7zXZ", "compressed by xz", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNPACK),
    (b"PK\x03\x04", "a zip archive, or a document that is one", _UNPACK),
    (b"PAR1", "a parquet table", REWRITE),
    (b"ARROW1", "an Arrow table", REWRITE),
    (b"%PDF", "a PDF", REWRITE),
)
"""First bytes of files that are given for text by mistake, what these are, and the remedy."""
_LONGEST_KEY, _MOST_KEYS = 40, 10
"""Characters of a key, and keys, that are named at most."""
NOT_UTF8 = "not UTF-8 text: save it as UTF-8"


def has_row_suffix(name: str | Path) -> bool:
    """Return whether a file's name says that it holds rows of JSON."""
    return Path(name).suffix.lower() in ROW_SUFFIXES


def _is_utf16(data: bytes) -> bool:
    """Whether data is probably UTF-16 without a byte order mark: many pairs of bytes then have a zero on one side."""
    start = data[:4096]
    zeros = sorted((start[::2].count(0), start[1::2].count(0)))
    return len(data) % 2 == 0 and zeros[0] == 0 and 4 * zeros[1] >= len(start)


def decode_text(file: Path, data: bytes, form: str = TEXT_FILE) -> str:
    r"""Decode a file as UTF-8, or as its byte order mark says, and end its lines in \n.

    A file that is compressed, a table or not text is refused; `form` says in the message what is asked for.
    """
    for start, what, remedy in _OTHER_FORMATS:
        if data.startswith(start):
            raise UserError(f"{file}: {what}, and no text; {remedy}")
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        why = "not UTF-8 text"
        if not encoding.startswith("utf-8"):
            why = f"its byte order mark says {encoding.upper()}, and it is not"
        raise UserError(f"{file}: {why} (byte {error.start}); give a {form} in {ENCODINGS}") from error
    if "\0" in text:  # no tokenizer was trained on it
        if _is_utf16(data):
            raise UserError(f"{file} is {NOT_UTF8}")
        raise UserError(f"{file}: a binary file (it holds a zero byte); give a {form} in {ENCODINGS}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class Row(dict[str, Any]):
    """An object in a file of rows, which remembers which of its keys were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, and remember that it was read."""
        self.read.add(key)
        return super().get(key, default)

    def unread(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that were not read; those inside values that were, with the outer key and a dot."""
        for key, value in self.items():
            if key not in self.read:
                yield f"{prefix}{key}"
                continue
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, Row):
                    yield from inner.unread(f"{prefix}{key}.")


def parse_json_rows(file: Path, content: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in the decoded content of a file of JSON, one a line or in one array, each after its place.

    At the end a notice names the keys that nobody has read; one for each file in a call.
    """
    unread: dict[str, None] = {}
    for where, value in _parse_rows(file, content):
        yield where, value
        if isinstance(value, Row):
            unread |= dict.fromkeys(value.unread())
    if unread:
        names = [key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…" for key in unread]
        more = f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else ""
        say_once(f"{file}: keys of its rows that are not read: {', '.join(names[:_MOST_KEYS])}{more}")


def _parse_rows(file: Path, content: str) -> Iterator[tuple[str, Any]]:
    stripped = content.lstrip("\ufeff \t\n")
    if stripped.startswith("[") or (file.suffix.lower() == ".json" and _is_one_value(stripped)):
        parsed = _parse(f"{file}", content.lstrip("\ufeff"))
        for number, value in enumerate(parsed if isinstance(parsed, list) else [parsed], start=1):
            yield f"{file}, row {number}", value
        return
    # split("\n"), not splitlines(): JSON strings may hold U+2028 and its like unescaped
    for number, line in enumerate(content.split("\n"), start=1):
        # In files that were put together, a byte order mark can stand in front of any line.
        line = line.removeprefix("\ufeff")
        if line.strip():
            yield f"{file}, line {number}", _parse(f"{file}, line {number}", line)


def _is_one_value(content: str) -> bool:
    """Return whether a text is one JSON value over several lines, and not one a line."""
    first, _, rest = content.partition("\n")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return bool(rest.strip())
    return False


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text, object_hook=Row)
    except json.JSONDecodeError as error:
        place = "" if "\n" not in text.strip("\n") else f", line {error.lineno}"
        raise UserError(f"{where}{place}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply") from error


def check_unicode(where: str, *texts: str) -> None:
    """Refuse texts that hold half a surrogate pair, which JSON can write and no tokenizer reads."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: {error.object[error.start]!a} is half of a surrogate pair and no Unicode character; cut "
                "texts between characters, not between units of UTF-16"
            ) from error
