"""Which tokens stay: what each one's absence costs by the counts of a text, and the order in which they go.

A removed token becomes the tokens that it splits into (`Pieces.splits`): every time that it is used, the text grows by
so many tokens less one. So tokens go in the order of that growth, least first, and what is used in their place is
counted for their parts from then on. A character that becomes its bytes costs more than that (`_BYTE`).
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import floor, inf, log2, sqrt

from ckpt_prune.stages.vocabulary.pieces import Pieces

_COUNTED = 4
"""Tokens are told apart by whether they were seen never, once … so often; beyond that a count speaks for itself."""
_LEAST_EXPECTED = 2.0**-20
"""Tokens that are expected more seldom are all alike."""
_LEAST_WORTH = 1e-4
"""What is added to both figures of a token's worth: one that is zero shall not hide the other."""
_BYTE = 4
"""A byte in place of a character counts as so many tokens: a model has seldom seen one there, and predicts it badly.

By tokens alone, a digit costs nothing as its byte. In Gemma 3 270M each one costs some 25 nats.
"""


def expected_uses(
    pieces: Pieces, parts: Sequence[Mapping[int, int]], predicted: Sequence[float] | None = None
) -> dict[int, float]:
    """Return how often each token is expected in another text as long as all parts of this one together.

    A token seen r > 4 times is expected r times. What a smaller r is worth is estimated with each part left out in turn
    (deleted estimation, Jelinek and Mercer 1985): it is the mean count, in the part left out, of tokens that are alike
    and that the other parts have r times. Alike are tokens of one script and one octave of ranks; and, where the model
    predicts text, tokens that it expects about as often, by an octave. The geometric mean of both is taken: the first
    knows nothing of the text's language and subject, the second nothing of other subjects. Without parts a token
    counts as 1 / rank (Zipf).

    Args:
        predicted: how often the model expects each row in a text as long as all parts.
    """
    ranks = pieces.ranks
    if not parts:
        order = {index: place for place, index in enumerate(sorted(ranks, key=lambda each: (ranks[each], each)))}
        return {index: 1 / (1 + place) for index, place in order.items()}
    by_rank = {index: (pieces.script(pieces.names[index]), floor(log2(max(2, ranks[index] + 2)))) for index in ranks}
    worth = _deleted_estimates(parts, by_rank)
    if predicted is None:
        return worth
    expected = dict(enumerate(predicted))
    by_model = {index: floor(log2(max(_LEAST_EXPECTED, expected.get(index, 0.0)))) for index in ranks}
    also = _deleted_estimates(parts, by_model)
    return {index: sqrt((worth[index] + _LEAST_WORTH) * (also[index] + _LEAST_WORTH)) for index in ranks}


def _deleted_estimates(parts: Sequence[Mapping[int, int]], cells: Mapping[int, Hashable]) -> dict[int, float]:
    """Return what each token is worth by the others of its cell."""
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update(part)
    # Of every token that is not seen at all, each part left out finds nothing.
    total: dict[tuple[Hashable, int], float] = defaultdict(float)
    members: Counter[tuple[Hashable, int]] = Counter()
    for index, cell in cells.items():
        if not counts[index]:
            members[cell, 0] += len(parts)
            continue
        for part in parts:
            count = part.get(index, 0)
            seen = counts[index] - count
            if seen <= _COUNTED:
                total[cell, seen] += count
                members[cell, seen] += 1

    def worth(index: int) -> float:
        seen, cell = counts[index], cells[index]
        if seen > _COUNTED or not members[cell, seen]:
            return float(seen)
        return len(parts) * total[cell, seen] / members[cell, seen]

    return {index: worth(index) for index in cells}


@dataclass(frozen=True)
class TokenRemoval:
    """Tokens in the order in which they go.

    Attributes:
        order: ids.
        growth: expected number of tokens more, once each and all before it are gone; bytes count `_BYTE` times.
    """

    order: Sequence[int]
    growth: Sequence[float]


def removal_order(pieces: Pieces, kept: Iterable[int], uses: Mapping[int, float], whole: Set[int]) -> TokenRemoval:
    """Order the tokens that may go by what they cost.

    Args:
        kept: tokens that are there, closed (`Pieces.close`).
        uses: how often each is expected (`expected_uses`); of tokens that are not in `kept`, too.
        whole: tokens of `kept` that must stay.
    """
    kept, splits, ranks = set(kept), pieces.splits, pieces.ranks
    uses = defaultdict(float, uses)
    for index in [each for each in uses if each not in kept]:
        for part in pieces.expand(index, kept):
            uses[part] += uses[index]
    needed_by: dict[int, int] = defaultdict(int)
    if pieces.closed:
        for index in kept:
            for part in splits.get(index, ()):
                needed_by[part] += 1

    def growth_of(index: int) -> float:
        # A token that no text becomes has no split: it goes first, and costs nothing.
        parts = splits.get(index, ())
        expanded = [each for part in parts for each in pieces.expand(part, kept)]
        return uses[index] * (sum(_BYTE if each in pieces.byte_ids else 1 for each in expanded) - 1) if parts else 0.0

    heap = [
        (growth_of(index), -ranks.get(index, inf), index)
        for index in kept
        if index not in whole and not needed_by[index]
    ]
    heapq.heapify(heap)
    order, growths, total = [], [], 0.0
    while heap:
        growth, rank, index = heapq.heappop(heap)
        if index not in kept:
            continue
        now = growth_of(index)
        if now > growth:  # others that went have made it dearer
            heapq.heappush(heap, (now, rank, index))
            continue
        kept.discard(index)
        total += now
        order.append(index)
        growths.append(total)
        parts = splits.get(index, ())
        for part in parts:
            for each in pieces.expand(part, kept):
                uses[each] += uses[index]
        if pieces.closed:
            for part in parts:
                needed_by[part] -= 1
                if not needed_by[part] and part not in whole:
                    heapq.heappush(heap, (growth_of(part), -ranks.get(part, inf), part))
    return TokenRemoval(order, growths)
