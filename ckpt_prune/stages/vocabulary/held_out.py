"""The parts of a text: one that tokens are counted on, and one that is held out to measure what fewer tokens cost."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import Tokenizer

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.bits import TextPiece

_HELD = 8
"""One part of so many of a text is held out, its last one."""
WINDOWS, WINDOW = 8, 512
"""Pieces that bits are measured on, of all texts together, and how many tokens one has at most, about."""
PREDICTED_WINDOWS = 16
"""Pieces of what is counted in which the model is asked which tokens it expects, of all texts together."""


@dataclass(frozen=True)
class SplitText:
    """A text in the parts that tokens are counted on, and the part that is held out."""

    name: str
    parts: tuple[str, ...]
    held: str

    @classmethod
    def of(cls, name: str, text: str) -> "SplitText":
        places = [0, *(_line_end(text, len(text) * part // _HELD) for part in range(1, _HELD)), len(text)]
        *parts, held = (text[begin:end] for begin, end in pairwise(places))
        if not "".join(parts).strip() or not held.strip():
            raise UserError(f"{name}: too short to hold a part out; give more text")
        return cls(name, tuple(parts), held)


def _line_end(text: str, place: int) -> int:
    """Return the place after the next line break, or this one if there is none nearby."""
    line_break = text.find("\n", place, place + 10_000)
    return place if line_break < 0 else line_break + 1


def count_tokens(tokenizer: Tokenizer, text: str) -> Counter[int]:
    """Count the tokens of a text, without those that stand around it."""
    return Counter(tokenizer.encode(text, add_special_tokens=False).ids)


def piece_tokens(context: int) -> int:
    """Return about how many tokens a piece has, so that a model of this context reads it with a smaller vocabulary."""
    return min(WINDOW, context // 4)


def spread_pieces(tokenizer: Tokenizer, text: str, size: int, count: int | None = None) -> list[TextPiece]:
    """Cut pieces out of a text, each of about so many tokens, and of one and a half times as many at most.

    Args:
        size: tokens of a piece.
        count: how many pieces, spread over the text; None for the whole text.
    """
    length = min(len(text), max(8, len(text) * size // max(1, count_tokens(tokenizer, text).total())))
    most = max(1, len(text) // length)
    count = most if count is None else min(count, most)
    begins = [(len(text) - length) * place // max(1, count - 1) for place in range(count)]
    return [piece for begin in begins for piece in _short_pieces(tokenizer, text[begin : begin + length], size)]


def _short_pieces(tokenizer: Tokenizer, text: str, size: int) -> Iterator[TextPiece]:
    """Yield a text as one piece, or halves of it where that has too many tokens."""
    if len(text) < 2 or count_tokens(tokenizer, text).total() <= 1.5 * size:
        yield TextPiece.of(text)
    else:
        yield from _short_pieces(tokenizer, text[: len(text) // 2], size)
        yield from _short_pieces(tokenizer, text[len(text) // 2 :], size)
