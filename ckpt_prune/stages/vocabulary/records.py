"""Records of a smaller vocabulary."""

import base64
import hashlib
import zlib
from collections.abc import Iterable

from pydantic import Field

from ckpt_prune.common.records import Count, Figure, FixedRecord


class TextCost(FixedRecord):
    """The cost of fewer tokens on the held-out part of a text.

    Attributes:
        bytes: of that part, in UTF-8.
        tokens_before, tokens_after: that it is written with.
        bits_before, bits_after: bits per byte of some windows of it, by the model with all tokens and with fewer;
            absent if the model predicts no text.
        windows: how many.
        predicted: bits per byte more that were expected of the whole part, as a share; absent if none were.
    """

    optional = frozenset({"bits_before", "bits_after", "predicted"})

    name: str
    bytes: Count
    tokens_before: Count
    tokens_after: Count
    bits_before: Figure = None
    bits_after: Figure = None
    windows: Count = 0
    predicted: Figure = None

    @property
    def growth(self) -> float:
        """Tokens more, as a share."""
        return self.tokens_after / max(1, self.tokens_before) - 1

    @property
    def loss(self) -> float | None:
        """Bits per byte more, as a share; None if they were not measured."""
        if self.bits_before is None or self.bits_after is None or not self.bits_before:
            return None
        return self.bits_after / self.bits_before - 1


class VocabularyRecord(FixedRecord):
    """A smaller vocabulary.

    Attributes:
        kind: of the tokenizer's model.
        rows: of the dense embedding.
        tokens: of the dense tokenizer.
        kept: rows that stay, as a string: base64 of the deflated bits, the least first (`kept_rows`).
        rows_kept: how many these are.
        left_out: files of the source that say the vocabulary in a form that is not written anew.
        texts: what it costs, by text.
    """

    optional = frozenset({"left_out", "texts"})

    kind: str
    rows: Count
    tokens: Count
    rows_kept: Count
    kept: str
    left_out: list[str] = Field(default_factory=list)
    texts: list[TextCost] = Field(default_factory=list)

    @property
    def digest(self) -> str:
        """SHA-256 of what stays."""
        return hashlib.sha256(self.kept.encode()).hexdigest()

    @property
    def kept_rows(self) -> list[int]:
        """The rows that stay, ascending. ValueError if the string is damaged."""
        return unpack_rows(self.kept)


def pack_rows(rows: Iterable[int]) -> str:
    """Return rows as a string, which `unpack_rows` reads."""
    rows = list(rows)
    data = bytearray(max(rows) // 8 + 1)
    for row in rows:
        data[row // 8] |= 1 << row % 8
    return base64.b64encode(zlib.compress(bytes(data), 9)).decode()


def unpack_rows(packed: str) -> list[int]:
    """Return the rows of a string that `pack_rows` made, ascending. ValueError if it is damaged."""
    try:
        data = zlib.decompress(base64.b64decode(packed))
    except zlib.error as error:
        raise ValueError("the rows that stay are damaged") from error
    return [8 * place + bit for place, byte in enumerate(data) for bit in range(8) if byte >> bit & 1]


class VocabularyFields(FixedRecord):
    """The smaller vocabulary; None if all tokens stay."""

    optional = frozenset({"vocabulary"})

    vocabulary: VocabularyRecord | None = None
