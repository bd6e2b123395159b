"""Names and texts from files, where a terminal or a model card would obey them instead of showing them."""

import re
from contextlib import redirect_stdout
from typing import Any, TextIO, cast

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls but tab and newline, what ends lines or turns the direction of the text around it, and halves of surrogate
pairs, which stand for bytes of file names that are no Unicode and which no stream takes."""
_LONGEST = 1200
"""Characters of a refusal; names from files have no end, and the longest of this tool's own have 500."""
_ENDLESS = re.compile(r"\S{512,}")
_MARKS = re.compile(r"[\\\[\]<`|]|^[#>+-]|^\d+(?=\.)")


def plain(text: str) -> str:
    r"""Text with every such character as Python writes it, such as \x1b."""
    return OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def is_plain(name: str) -> bool:
    """Whether a name is shown as it is, in one line."""
    return OBEYED.search(name) is None and "\n" not in name and "\t" not in name


def line(text: str) -> str:
    """A refusal: plain, in one line, and without the middle of what no reader gets through."""
    whole = _ENDLESS.sub(_ends, plain(text).replace("\n", "\\n"))
    return whole if len(whole) <= _LONGEST else f"{whole[: _LONGEST // 2]} … {whole[-_LONGEST // 4 :]}"


def _ends(found: re.Match[str]) -> str:
    """Both ends of a name that is too long to be read, and how long it is."""
    return f"{found[0][:60]}…{found[0][-60:]} ({len(found[0]):,} characters)"


def markdown(text: str) -> str:
    """Text in one line of Markdown, without what makes links, pictures, code, cells, headings or HTML of it."""
    return _MARKS.sub(lambda found: f"\\{found[0]}", " ".join(plain(text).split()))


def coded(text: str) -> str:
    """Text in one line of Markdown as code."""
    return f"`{' '.join(plain(text).split()).replace('`', chr(39))}`"


class _Plain:
    """A text stream on which everything is written plain."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(plain(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def plain_output(stream: TextIO) -> redirect_stdout[TextIO]:
    """Whatever is printed in this context is printed plain; commands print names from many files in many places."""
    return redirect_stdout(cast(TextIO, _Plain(stream)))
