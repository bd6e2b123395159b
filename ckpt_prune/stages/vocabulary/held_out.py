"""What fewer tokens cost: tokens more on held-out text, and bits per byte of the model that reads it so."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.streamed import StreamedModel

_HELD = 8
"""One part of so many of a text is held out, its last one."""
WINDOWS, WINDOW = 8, 512
"""Windows that bits are measured on, of all texts together, and tokens of one."""
_STRIP = 64
"""Positions whose logits are held together."""


@dataclass(frozen=True)
class SplitText:
    """A text in the part that tokens are counted on, in two halves, and the part that is held out."""

    name: str
    halves: tuple[str, str]
    held: str

    @classmethod
    def of(cls, name: str, text: str) -> "SplitText":
        places = [_line_end(text, len(text) * part // (2 * _HELD)) for part in (_HELD - 1, 2 * _HELD - 2)]
        first, second = places
        if not text[:first].strip() or not text[second:].strip():
            raise UserError(f"{name}: too short to hold a part out; give more text")
        return cls(name, (text[:first], text[first:second]), text[second:])


def _line_end(text: str, place: int) -> int:
    """Return the place after the next line break, or this one if there is none nearby."""
    found = text.find("\n", place, place + 10_000)
    return place if found < 0 else found + 1


def count_tokens(tokenizer: Tokenizer, text: str) -> Counter[int]:
    """Count the tokens of a text, without those that stand around it."""
    return Counter(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Chunk:
    """A piece of held-out text that a model reads at once.

    Attributes:
        start: place in it of the first white space: tokens from there on count, so that both tokenizers' count alike.
    """

    text: str
    start: int

    @property
    def bytes(self) -> int:
        """Of what counts, in UTF-8."""
        return len(self.text[self.start :].encode())


def cut_chunks(text: str, tokens: int, count: int) -> list[Chunk]:
    """Cut some pieces out of a text, spread over it, each of about `WINDOW` tokens.

    Args:
        tokens: of the whole text.
        count: how many pieces.
    """
    length = min(len(text), max(64, len(text) * WINDOW // max(1, tokens)))
    count = min(count, max(1, len(text) // length))
    chunks = []
    for place in range(count):
        begin = (len(text) - length) * place // max(1, count - 1)
        piece = text[begin : begin + length]
        start = next((at for at, each in enumerate(piece) if each.isspace() and at), 0)
        chunks.append(Chunk(piece, start))
    return chunks


class BitCounter:
    """Measures the bits that a model needs for pieces of text, as a tokenizer splits them.

    The model is the one with all tokens. With fewer, it reads the same rows of the embedding, and its head has the
    logits of the tokens that stay alone.

    Args:
        first: the token that the model reads before a text; None if it reads none.
    """

    def __init__(self, model: StreamedModel, chunks: Sequence[Chunk], first: int | None) -> None:
        self._model, self._chunks, self._first = model, chunks, first

    @property
    def bytes(self) -> int:
        """Bytes of what counts."""
        return sum(chunk.bytes for chunk in self._chunks)

    def count(
        self, tokenizer: Tokenizer, numbers: Mapping[int, int] | None = None, kept: Tensor | None = None
    ) -> tuple[list[float], int]:
        """Return the bits of each piece, and the tokens of all that count.

        Args:
            numbers: id of the tokenizer → row of the model; None if they are the same.
            kept: rows whose logits there are, ascending; None for all.
        """
        encoded = [tokenizer.encode(chunk.text, add_special_tokens=False) for chunk in self._chunks]
        before = [] if self._first is None else [self._first]
        windows, starts = [], []
        for chunk, each in zip(self._chunks, encoded, strict=True):
            ids = [numbers[index] for index in each.ids] if numbers is not None else list(each.ids)
            counted = next((at for at, (_, end) in enumerate(each.offsets) if end > chunk.start), 0)
            windows.append([*before, *ids])
            starts.append(max(1, len(before) + counted))
        length = max(map(len, windows))
        padded = torch.tensor([[*ids, *[ids[-1]] * (length - len(ids))] for ids in windows])
        logits = self._model.read(padded, "measuring bits per byte")
        places = None if kept is None else {int(row): at for at, row in enumerate(kept)}
        bits, tokens = [], 0
        for row, (ids, start) in enumerate(zip(windows, starts, strict=True)):
            strip, total = logits.of_batch(slice(row, row + 1)), 0.0
            for begin in range(start - 1, len(ids) - 1, _STRIP):
                part = slice(begin, min(begin + _STRIP, len(ids) - 1))
                own = strip(0, part).float()
                own = own if kept is None else own.index_select(-1, kept.to(own.device))
                wanted = ids[part.start + 1 : part.stop + 1]
                targets = torch.tensor(wanted if places is None else [places[index] for index in wanted])
                total -= float(own.log_softmax(-1).cpu().gather(1, targets[:, None]).sum(dtype=torch.float64))
            bits.append(total / log(2))
            tokens += len(ids) - start
        return bits, tokens
