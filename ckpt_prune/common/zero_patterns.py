"""Patterns of zeros: a share of the weights anywhere, or N kept in every M consecutive inputs of a row."""

import re
from dataclasses import dataclass
from typing import Literal

Compare = Literal["row", "matrix"]
"""Which weights are ranked together."""
RotationName = Literal["denoise", "cayley", "shared", "groups", "denoise-code"]
"""Rotations that are learned before a mask, by name."""
UNSTRUCTURED = "unstructured"
MOST = 32
"""Largest M. A wider group is hardly more than a share of the row."""


@dataclass(frozen=True)
class GroupPattern:
    """N:M: of every `of` consecutive weights of a row, `kept` stay. N is the number KEPT."""

    kept: int
    of: int

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"

    @property
    def ratio(self) -> float:
        """Share of weights that are dropped."""
        return 1 - self.kept / self.of

    def keeping(self, ratio: float) -> "GroupPattern | None":
        """Return the pattern of as wide groups that has this share of zeros; None if it has none."""
        kept = round((1 - ratio) * self.of)
        return None if kept == self.of else GroupPattern(kept, self.of)


def parse_pattern(text: str) -> GroupPattern | None:
    """Read the pattern of a recipe: None for unstructured."""
    if text == UNSTRUCTURED:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise ValueError(f"pattern {text!r} is neither {UNSTRUCTURED} nor N:M, for example 2:4")
    kept, of = int(match[1]), int(match[2])
    if not 1 <= kept < of <= MOST:
        raise ValueError(
            f"pattern {text!r} cannot be meant: N:M keeps N of every M consecutive weights, with 1 <= N < M <= {MOST}"
        )
    return GroupPattern(kept, of)


def describe_mask(method: str, pattern: str, only: str | None = None) -> str:
    """Describe a mask in a line: its method, its pattern if it has one, and the part of the blocks that it is of."""
    how = method if pattern == UNSTRUCTURED else f"{method} {pattern}"
    return how if only is None else f"{how} of the {only}"
