"""Bits per byte: models whose tokenizers differ, on the same pieces of text (README.md, section 1).

Perplexity is of a token, and cannot be compared where tokens differ. The bits that a model needs for a text can.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any, ClassVar

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import check_finite, check_windows
from ckpt_prune.evaluation.display import Columns, Figures
from ckpt_prune.evaluation.perplexity import LanguageModel, WholeLogits
from ckpt_prune.evaluation.streamed import StreamedModel

STRIP = 64
"""Positions whose logits are held together."""


@dataclass(frozen=True)
class BitsScore(Figures):
    """Bits that a model needs for a byte of a text.

    Attributes:
        bits_per_byte: −log2 of the text's probability over its bytes in UTF-8, piece by piece.
        bytes: of what was scored: all of a piece behind its first white space.
        tokens: that the model's own tokenizer writes these bytes with.
        pieces: of text, each read by itself.
    """

    columns: ClassVar[Columns] = (
        ("bits per byte", "bits_per_byte", ".4f"),
        ("bytes", "bytes", ","),
        ("tokens", "tokens", ","),
    )
    bits_per_byte: float
    bytes: int
    tokens: int
    pieces: int

    @classmethod
    def join(cls, scores: Sequence["BitsScore"]) -> "BitsScore":
        """Return the score of several texts together."""
        size = sum(score.bytes for score in scores)
        bits = sum(score.bits_per_byte * score.bytes for score in scores)
        return cls(bits / size, size, *(sum(getattr(each, name) for each in scores) for name in ("tokens", "pieces")))


@dataclass(frozen=True)
class TextPiece:
    """A piece of text that a model reads at once.

    Attributes:
        start: place in it of the first white space: tokens behind it count, so that all tokenizers' count alike.
    """

    text: str
    start: int

    @classmethod
    def of(cls, text: str) -> "TextPiece":
        return cls(text, next((at for at, each in enumerate(text) if each.isspace() and at), 0))

    @property
    def bytes(self) -> int:
        """Bytes in UTF-8 of the text that counts."""
        return len(self.text[self.start :].encode())


def cut_pieces(text: str, tokenizers: Sequence[Tokenizer], window: int, limit: int | None) -> list[TextPiece]:
    """Cut a text into pieces, from its start, of at most about `window` tokens of each tokenizer.

    A piece ends before white space. The rest at the end of the text is dropped.
    """
    encoded = [tokenizer.encode(text, add_special_tokens=False) for tokenizer in tokenizers]
    ends = max((each.offsets for each in encoded), key=len)
    pieces: list[TextPiece] = []
    begin, first = 0, 0
    while first + window - 2 < len(ends) and (limit is None or len(pieces) < limit):
        stop = ends[first + window - 2][0]
        space = next((at for at in range(stop, begin, -1) if text[at].isspace()), stop)
        pieces.append(TextPiece.of(text[begin:space]))
        begin = space
        first = next((at for at in range(first, len(ends)) if ends[at][1] > begin), len(ends))
    if not pieces:
        raise UserError(
            f"the text is too short for one window: it has {len(ends)} tokens, a window takes {window}; give more text"
        )
    return pieces


class PieceReader:
    """Reads pieces of text by a model, as a tokenizer splits them.

    Args:
        model: a causal language model.
        numbers: id of the tokenizer → row of the model's embedding; None if they are the same.
        kept: rows whose logits there are, ascending; None for all.
        what: names the work.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        pieces: Sequence[TextPiece],
        *,
        numbers: Mapping[int, int] | None = None,
        kept: Tensor | None = None,
        what: str = "measuring bits per byte",
    ) -> None:
        self._model, self.pieces, self._kept, self._what = model, pieces, kept, what
        framed = tokenizer.encode("a").ids
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        self._before = framed[: len(framed) - len(plain)][:1] if framed[-len(plain) :] == plain else framed[:1]
        self._encoded: list[Encoding] = [tokenizer.encode(piece.text, add_special_tokens=False) for piece in pieces]
        rows = (lambda index: index) if numbers is None else numbers.__getitem__
        self._windows = [[*map(rows, [*self._before, *each.ids])] for each in self._encoded]

    def start(self, piece: int) -> int:
        """Return the place of the first token of a piece that counts, in its window."""
        offsets, space = self._encoded[piece].offsets, self.pieces[piece].start
        counted = next((at for at, (_, end) in enumerate(offsets) if end > space), 0)
        return max(1, len(self._before) + counted)

    @cached_property
    def _logits(self) -> Callable[[slice], Callable[[int, slice], Tensor]]:
        length = max(map(len, self._windows))
        padded = torch.tensor([[*ids, *[ids[-1]] * (length - len(ids))] for ids in self._windows])
        check_windows(self._model, padded)
        if isinstance(self._model, StreamedModel):
            return self._model.read(padded, self._what).of_batch
        return WholeLogits(self._model.eval(), padded).of_batch

    def strips(self, piece: int, keep: Tensor | None = None) -> "list[tuple[slice, Tensor]]":
        """Return positions of a piece's window and their log-probabilities, float32 on CPU, strip by strip.

        Args:
            keep: tokens to which these are restricted; None for all that the model has.
        """
        chosen = keep if keep is not None else self._kept
        strip, stop = self._logits(slice(piece, piece + 1)), len(self._windows[piece]) - 1
        predictions = []
        for begin in range(self.start(piece) - 1, stop, STRIP):
            part = slice(begin, min(begin + STRIP, stop))
            logits = strip(0, part).float()
            logits = logits if chosen is None else logits.index_select(-1, chosen.to(logits.device))
            predictions.append((part, logits.log_softmax(-1).cpu()))
        return predictions

    def count(self) -> tuple[list[float], int]:
        """Return the bits of each piece, and how many tokens count in all."""
        bits, tokens = [], 0
        places = None if self._kept is None else {int(row): at for at, row in enumerate(self._kept)}
        for piece, ids in enumerate(track(self._windows, self._what, unit="piece")):
            total = 0.0
            for part, predicted in self.strips(piece):
                following = ids[part.start + 1 : part.stop + 1]
                targets = torch.tensor(following if places is None else [places[index] for index in following])
                total -= float(predicted.gather(1, targets[:, None]).sum(dtype=torch.float64))
            check_finite("predictions", torch.tensor(total))
            bits.append(total / log(2))
            tokens += len(ids) - self.start(piece)
        return bits, tokens

    def expected_tokens(self) -> tuple[Tensor, int]:
        """Return how often the model expects each row in these pieces, and how many tokens count in all.

        That is the sum of its probabilities over the predictions that count, (rows,) float64. It tells apart tokens
        that a text of this kind has now and then, and those that it never has, where the text itself has neither.
        """
        expected, tokens = torch.zeros(()), 0
        for piece in track(range(len(self.pieces)), self._what, unit="piece"):
            for part, predicted in self.strips(piece):
                expected = expected + predicted.exp().sum(0, dtype=torch.float64)
                tokens += part.stop - part.start
        check_finite("predictions", expected)
        return expected, tokens

    def score(self) -> BitsScore:
        """Return the bits per byte of all pieces."""
        bits, tokens = self.count()
        size = max(1, sum(piece.bytes for piece in self.pieces))
        return BitsScore(sum(bits) / size, size, tokens, len(self.pieces))

    def ends(self, piece: int) -> dict[int, int]:
        """Return place in the text of a piece → position of the token that ends there and counts."""
        before, start = len(self._before), self.start(piece)
        return {end: before + at for at, (_, end) in enumerate(self._encoded[piece].offsets) if before + at >= start}


@dataclass(frozen=True)
class BitsComparison:
    """Two models with tokenizers of their own on the same pieces of text.

    Attributes:
        kl: mean KL(reference ‖ model) in nats, where both have read the same text, over the tokens that both have.
        top1_agreement: share of these places at which both put the same one of those tokens first.
    """

    score: BitsScore
    reference_score: BitsScore
    kl: float | None
    top1_agreement: float | None


def compare_bits(
    models: Sequence[LanguageModel], tokenizers: Sequence[Tokenizer], pieces: Sequence[TextPiece]
) -> BitsComparison:
    """Measure bits per byte of a model and a reference, and how far their predictions are apart.

    They are held against each other at ends of tokens that both have, over the tokens that both have.
    """
    ours, theirs = (PieceReader(model, tokenizer, pieces) for model, tokenizer in zip(models, tokenizers, strict=True))
    scores = ours.score(), theirs.score()
    numbers = [tokenizer.get_vocab() for tokenizer in tokenizers]
    sizes = [model.config.get_text_config().vocab_size for model in models]
    shared = sorted(
        token
        for token in numbers[0].keys() & numbers[1].keys()
        if all(n[token] < s for n, s in zip(numbers, sizes, strict=True))
    )
    if not shared:
        return BitsComparison(*scores, None, None)
    keep = [torch.tensor([id_of[token] for token in shared]) for id_of in numbers]
    total, same, places = 0.0, 0, 0
    for piece in range(len(pieces)):
        ends = ours.ends(piece), theirs.ends(piece)
        common = sorted(ends[0].keys() & ends[1].keys())[:-1]
        if not common:
            continue
        q, p = (
            _rows(reader.strips(piece, tokens), [place_of[end] for end in common])
            for reader, tokens, place_of in zip((ours, theirs), keep, ends, strict=True)
        )
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        places += len(common)
    if not places:
        return BitsComparison(*scores, None, None)
    return BitsComparison(*scores, total / places, same / places)


def _rows(strips: Sequence[tuple[slice, Tensor]], positions: Sequence[int]) -> Tensor:
    """Return the log-probabilities at some positions."""
    first = strips[0][0].start
    return torch.cat([predicted for _, predicted in strips])[torch.tensor(positions) - first]


def fast_tokenizer(tokenizer: Any, folder: object) -> Tokenizer:
    """Return the tokenizer of the tokenizers library inside one of transformers; UserError if there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{folder}: its tokenizer has no tokenizer.json, so its tokens have no places in a text")
    return uncut_tokenizer(backend.to_str())


def uncut_tokenizer(content: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json's text, which adds nothing to short texts and cuts no long ones."""
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
