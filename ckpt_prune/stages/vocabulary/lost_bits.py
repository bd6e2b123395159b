"""The cost of fewer tokens on held-out text: bits of windows in which tokens are gone, with the model as it would be.

Few windows are read, and a token that goes is rare: in windows that are merely spread over a text nothing changes. So
windows are drawn in proportion to the tokens that they would take more, and what one such token costs in them stands
for all others (the estimator of Hansen and Hurwitz, 1943).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from tokenizers import Tokenizer

from ckpt_prune.common.spread import spread_evenly
from ckpt_prune.evaluation.bits import PieceReader, TextPiece
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.stages.vocabulary.held_out import WINDOWS, SplitText, count_tokens, piece_tokens, spread_pieces


@dataclass(frozen=True)
class LostBits:
    """The cost of fewer tokens on the held-out part of a text.

    Attributes:
        more: bits more with fewer tokens.
        windows: read for that.
    """

    more: float
    windows: int


def draw_windows(growths: Sequence[int], count: int) -> list[int]:
    """Draw windows in proportion to what they grow by, by equal steps over the sum: a window can be drawn twice."""
    total = sum(growths)
    ends = list(accumulate(growths))
    points = [total * (2 * place + 1) / (2 * count) for place in range(count)] if total else []
    return [next(at for at, end in enumerate(ends) if end > point) for point in points]


class HeldOutBits:
    """Measures what fewer tokens cost on held-out texts.

    Args:
        model: a causal language model, with all tokens.
    """

    def __init__(self, model: StreamedModel, tokenizer: Tokenizer, texts: Sequence[SplitText]) -> None:
        self._model, self._tokenizer, self._texts = model, tokenizer, texts
        self._size = piece_tokens(model.model.tokens)
        self._each = max(1, WINDOWS // len(texts))
        self._dense: dict[tuple[int, int], float] = {}

    @cached_property
    def _windows(self) -> list[list[TextPiece]]:
        return [spread_pieces(self._tokenizer, text.held, self._size) for text in self._texts]

    @cached_property
    def _tokens(self) -> list[list[int]]:
        return [[count_tokens(self._tokenizer, piece.text).total() for piece in of] for of in self._windows]

    def _dense_bits(self, windows: Sequence[tuple[int, int]]) -> list[float]:
        """Return the bits of windows (number of the text, of its window), each read once."""
        new = [each for each in dict.fromkeys(windows) if each not in self._dense]
        if new:
            bits, _ = PieceReader(self._model, self._tokenizer, [self._windows[t][w] for t, w in new]).count()
            self._dense.update(zip(new, bits, strict=True))
        return [self._dense[each] for each in windows]

    @cached_property
    def dense(self) -> list[float]:
        """Bits of the held-out part of each text by the model with all tokens, from windows spread over it."""
        spread = []
        for text, pieces in enumerate(self._windows):
            count = min(len(pieces), self._each)
            spread.append([(text, place) for place in spread_evenly(count, len(pieces))])
        self._dense_bits([window for windows in spread for window in windows])  # all at once
        sizes = [sum(self._windows[t][w].bytes for t, w in windows) for windows in spread]
        return [
            sum(self._dense_bits(windows)) / max(1, size) * len(text.held.encode())
            for text, windows, size in zip(self._texts, spread, sizes, strict=True)
        ]

    def lost(self, tokenizer: Tokenizer, kept: Sequence[int], numbers: Mapping[int, int]) -> list[LostBits]:
        """Return what fewer tokens cost, by text.

        Args:
            tokenizer: without the others.
            kept: rows of the embedding that stay, ascending: the head has no others.
            numbers: id of that tokenizer → row of the embedding.
        """
        growths: list[list[int]] = []
        drawn: list[list[tuple[int, int]]] = []
        for number, pieces in enumerate(self._windows):
            after = [count_tokens(tokenizer, piece.text).total() for piece in pieces]
            more = [max(0, now - before) for now, before in zip(after, self._tokens[number], strict=True)]
            growths.append(more)
            drawn.append([(number, window) for window in draw_windows(more, self._each)])
        chosen = [*dict.fromkeys(window for windows in drawn for window in windows)]
        changed = {}
        if chosen:
            read = [self._windows[t][w] for t, w in chosen]
            bits, _ = PieceReader(self._model, tokenizer, read, numbers=numbers, kept=torch.tensor(kept)).count()
            changed = {each: now - then for each, now, then in zip(chosen, bits, self._dense_bits(chosen), strict=True)}
        costs = []
        for windows, grown in zip(drawn, growths, strict=True):
            a_token = sum(changed[window] / grown[window[1]] for window in windows) / max(1, len(windows))
            costs.append(LostBits(a_token * sum(grown), len({*windows})))
        return costs
