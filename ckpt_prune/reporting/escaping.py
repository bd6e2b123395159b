"""Text nobody vouches for, inside HTML and SVG."""

import re
from html import escape

from ckpt_prune.common.safe_text import CONTROL_CHARACTERS

# XML has no controls, no halves of surrogate pairs (JSON can hold them) and no non-characters.
_IMPOSSIBLE = re.compile(f"{CONTROL_CHARACTERS.pattern}|[\ufffe\uffff]")


def text(value: str) -> str:
    """`value` as text or as a quoted attribute; what a page cannot hold becomes U+FFFD."""
    return escape(_IMPOSSIBLE.sub("\ufffd", value))
