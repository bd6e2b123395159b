"""Byte-pair encoding from the textbook (Sennrich et al. 2016, section 3.2), slowly: every merge is searched anew."""

from collections.abc import Iterable, Mapping, Sequence


def encode_word(symbols: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[str]:
    """Apply to a word the first merge of the list that fits, at its leftmost place, until none fits."""
    word = list(symbols)
    while True:
        for left, right in merges:
            at = next((at for at in range(len(word) - 1) if word[at] == left and word[at + 1] == right), None)
            if at is not None:
                word = [*word[:at], left + right, *word[at + 2 :]]
                break
        else:
            return word


def reachable(tokens: Iterable[str], merges: Sequence[tuple[str, str]]) -> set[str]:
    """Return the tokens that their own characters become."""
    return {token for token in tokens if encode_word(list(token), merges) == [token]}


def remaining_merges(merges: Sequence[tuple[str, str]], kept: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges whose two sides and product are all kept."""
    return [(left, right) for left, right in merges if {left, right, left + right} <= kept.keys()]
