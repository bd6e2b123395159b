"""Text nobody vouches for, inside HTML and SVG."""

import re
from html import escape

# Controls, halves of surrogate pairs (JSON can hold them, UTF-8 cannot) and non-characters: XML has none of them.
_IMPOSSIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def text(value: str) -> str:
    """`value` as text or as a quoted attribute; what a page cannot hold becomes U+FFFD."""
    return escape(_IMPOSSIBLE.sub("\ufffd", value))
