"""Whether a runtime's own tokenizer splits text into the tokens that the checkpoint's does."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ckpt_prune.common.errors import UserError

_SENTENCES = (
    "Hello, world! It's 3,141,592 or 2025-11-26; they'll \u00e9t\u00e9 na\u00efve \u4f60\u597d \U0001f680\n\n\n"
    "\tdef f(x):\n        return x**2  # 100%\n\r\n   spaces   IS'T can't  WON'T \u0623\u0647 12345678 ___ \u00bd\u00b2"
)
HARD_TEXTS = (_SENTENCES, "", " ", "  two")
_WINDOWS = 4


def texts_to_split(tokenizer: Any, windows: Tensor | list[list[int]]) -> list[str]:
    """Return texts that are hard to split, and those of some windows, (windows, length)."""
    decoded = tokenizer.batch_decode(windows[:_WINDOWS], skip_special_tokens=True)
    return [*HARD_TEXTS, *decoded]


def split(tokenizer: Any, text: str, *, framed: bool = True) -> list[int]:
    """Return the tokens of a text, with those that the tokenizer puts around it."""
    return list(tokenizer(text, verbose=False, add_special_tokens=framed)["input_ids"])


def check_texts_split(runtime: str, tokenizer: Any, texts: Sequence[str], theirs: Sequence[list[int]]) -> None:
    """Raise UserError if a runtime splits any of these texts into other tokens than the tokenizer."""
    for text, tokens in zip(texts, theirs, strict=True):
        check_tokens(runtime, text, split(tokenizer, text), tokens)


def check_tokens(runtime: str, text: str, ours: list[int], theirs: list[int]) -> None:
    """Raise UserError if the tokens of a text differ."""
    if ours != theirs:
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
        raise UserError(
            f"{runtime} splits {text[:40]!r} into other tokens than the checkpoint's tokenizer: from token {place} "
            f"{theirs[place : place + 5]} and not {ours[place : place + 5]}"
        )
