"""Escaping of names and texts from files, so that a terminal or a model card shows them instead of obeying them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

from ckpt_prune.common.errors import OutputError

CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Controls except tab and newline; characters that end lines or change the direction of text; and half surrogate
pairs, which stand for bytes of file names that are not Unicode and which no stream accepts."""
_LONGEST = 1200
"""Characters of a refusal. Names from files can have any length; this tool's own refusals have 500 at most."""
_ENDLESS = re.compile(r"\S{512,}")
_MARKUP = re.compile(r"(?P<number>^\d+)(?=\.)|[\\\[\]<`|]|^[#>+-]")


def escape_controls(text: str) -> str:
    r"""Replace control characters by Python's escapes, such as \x1b."""
    return CONTROL_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], text)


def has_no_controls(name: str) -> bool:
    """Return whether a name can be shown unchanged in one line."""
    return CONTROL_CHARACTERS.search(name) is None and "\n" not in name and "\t" not in name


def to_one_line(text: str) -> str:
    """Make a refusal one printable line, and leave out the middle of very long ones."""
    escaped = _ENDLESS.sub(_shorten, escape_controls(text).replace("\n", "\\n"))
    return escaped if len(escaped) <= _LONGEST else f"{escaped[: _LONGEST // 2]} … {escaped[-_LONGEST // 4 :]}"


def _shorten(match: re.Match[str]) -> str:
    name = match[0]
    return f"{name[:60]}…{name[-60:]} ({len(name):,} characters)"


def as_markdown(text: str) -> str:
    """Return text as one line of Markdown that makes no link, picture, code, cell, heading or HTML."""
    line = " ".join(escape_controls(text).split())
    return _MARKUP.sub(lambda match: f"{match[0]}\\" if match["number"] else f"\\{match[0]}", line)


def as_code(text: str) -> str:
    """Return text as code in one line of Markdown."""
    return f"`{' '.join(escape_controls(text).split()).replace('`', chr(39))}`"


class _EscapedStream:
    """A text stream that escapes what is written to it. Raises OutputError where that cannot be written.

    Attributes:
        used: whether anything was.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.used = False

    def write(self, text: str) -> int:
        with self._output_errors():
            self._stream.write(escape_controls(text))
        self.used = self.used or bool(text)
        return len(text)

    def flush(self) -> None:
        with self._output_errors():
            self._stream.flush()

    @contextmanager
    def _output_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"standard output cannot be written ({error.strerror}): send it to a place that takes all of it"
            ) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escape_output(stream: TextIO) -> redirect_stdout[TextIO]:
    """Escape everything that is printed within this context, since commands print names from files in many places."""
    return redirect_stdout(cast(TextIO, _EscapedStream(stream)))
