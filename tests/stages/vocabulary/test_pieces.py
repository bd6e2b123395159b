"""Tokens, what they split into, and tokenizers of fewer: every kind against its library and a slow oracle."""

import random

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.stages.vocabulary.choice import expected_uses, removal_order
from ckpt_prune.stages.vocabulary.hard_cases import hard_texts
from ckpt_prune.stages.vocabulary.pieces import Pieces, byte_letters, rebuild
from ckpt_prune.stages.vocabulary.scripts import script_of_bytes, script_of_text
from ckpt_prune.stages.vocabulary.settle import make_tokenizer
from tests.oracles import bpe
from tests.stages.vocabulary.tokenizers_of_tests import KINDS, byte_level, content_of, page

WHOLE = {kind: content_of(make()) for kind, make in KINDS.items()}


def pieces_of(kind: str) -> Pieces:
    pieces = Pieces.of(WHOLE[kind], kind)
    assert pieces.kind == kind
    return pieces


def fewer(pieces: Pieces, seed: int = 0, share: float = 0.4) -> list[int]:
    """A closed choice of tokens by chance."""
    draw = random.Random(seed)
    return sorted(pieces.close(index for index in sorted(pieces.ids.values()) if draw.random() < share))


def smaller(pieces: Pieces, kept: list[int]):
    numbers = {old: new for new, old in enumerate(kept)}
    return make_tokenizer(rebuild(pieces, numbers)), numbers


def test_merges_and_splits_of_bpe_are_those_of_the_oracle():
    pieces = pieces_of("byte-level BPE")
    merges = pieces.pairs
    tokens = [token for token in pieces.vocabulary if token not in pieces.added]
    assert bpe.reachable(tokens, merges) == set(tokens)
    for token in random.Random(1).sample(tokens, 60):
        word = list(token)
        for left, right in pieces.derive(token):
            at = next(at for at in range(len(word) - 1) if (word[at], word[at + 1]) == (left, right))
            word[at : at + 2] = [left + right]
        assert word == bpe.encode_word(list(token), merges) == [token]


@pytest.mark.parametrize("seed", range(3))
def test_kept_tokens_of_bpe_can_be_reached_and_nothing_of_them_is_missing(seed):
    pieces = pieces_of("byte-level BPE")
    kept = fewer(pieces, seed)
    vocabulary = {pieces.names[index]: index for index in kept}
    merges = bpe.remaining_merges(pieces.pairs, vocabulary)
    content = rebuild(pieces, {old: new for new, old in enumerate(kept)})
    assert [tuple(merge) for merge in content["model"]["merges"]] == merges
    own = [token for token in vocabulary if token not in pieces.added]
    assert bpe.reachable(own, merges) == set(own)
    # Closed and no more than that: without any one of the tokens that closing added, another is out of reach.
    needed = pieces.close([kept[-1]])
    for index in needed - pieces.needed - {kept[-1], *pieces.added.values()}:
        left = {pieces.names[each]: each for each in needed if each != index}
        assert pieces.names[kept[-1]] not in bpe.reachable([pieces.names[kept[-1]]], bpe.remaining_merges(merges, left))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_text_of_kept_tokens_is_written_as_before_and_all_text_is_read_back(kind, seed):
    pieces = pieces_of(kind)
    kept = fewer(pieces, seed)
    dense = make_tokenizer(pieces.content)
    tokenizer, numbers = smaller(pieces, kept)
    assert tokenizer.get_vocab_size() == len(kept)
    same = 0
    for text in [*page().split("\n"), *page().split(), *hard_texts()]:
        before, after = (each.encode(text, add_special_tokens=False).ids for each in (dense, tokenizer))
        if all(index in numbers for index in before):
            same += bool(before)
            assert after == [numbers[index] for index in before], text
        assert dense.decode(before) == tokenizer.decode(after), text
    assert same > 20
    framed = tokenizer.encode("a").ids
    assert [kept[framed[0]], kept[framed[-1]]] == [dense.encode("a").ids[0], dense.encode("a").ids[-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_splits_tell_what_the_smaller_tokenizer_does(kind):
    pieces = pieces_of(kind)
    uses = expected_uses(pieces, [])
    removal = removal_order(pieces, pieces.ids.values(), uses, pieces.close([]))
    assert len(set(removal.order)) == len(removal.order) == len(pieces.ids) - len(pieces.close([]))
    assert list(removal.growth) == sorted(removal.growth)
    kept = sorted({*pieces.ids.values()} - {*removal.order[:60]})
    assert pieces.close(kept) == {*kept}
    tokenizer, numbers = smaller(pieces, kept)
    dense = make_tokenizer(pieces.content)
    told = done = 0
    for word in page().split():
        ids = dense.encode(word, add_special_tokens=False).ids
        told += sum(len(pieces.expand(index, {*kept})) for index in ids)
        done += len(tokenizer.encode(word, add_special_tokens=False).ids)
    assert numbers
    assert abs(told - done) <= 0.005 * done


def test_without_a_token_the_text_grows_by_its_uses():
    pieces = pieces_of("byte-level BPE")
    whole, forced = {*pieces.ids.values()}, pieces.close([])
    counts = dict.fromkeys(whole, 0) | dict.fromkeys(pieces.vocabulary.values(), 1)
    removal = removal_order(pieces, whole, counts, forced)
    # Once all merges are gone every token is written by its bytes.
    letters = byte_letters().keys()
    expected = sum(len(token) - 1 for token in pieces.vocabulary if token not in pieces.added and {*token} <= letters)
    assert removal.growth[-1] == expected


def test_a_character_that_would_become_its_byte_stays_longer_than_a_merge_used_twice_as_often():
    pieces = pieces_of("BPE")
    joined = {part for pair in pieces.pairs for part in pair}
    character = next(
        index
        for token, index in pieces.vocabulary.items()
        if len(token.encode()) == 1 and token not in joined and {*pieces.splits.get(index, ())} <= pieces.byte_ids
    )
    merge = next(pieces.vocabulary[a + b] for a, b in reversed(pieces.pairs) if a + b not in joined)
    uses = dict.fromkeys(pieces.vocabulary.values(), 0) | {character: 10, merge: 20}
    order = removal_order(pieces, pieces.ids.values(), uses, pieces.close([])).order
    assert order.index(merge) < order.index(character)


def test_tokens_unlike_those_that_turn_up_are_expected_less():
    pieces = pieces_of("byte-level BPE")
    latin = {index for token, index in pieces.vocabulary.items() if pieces.script(token) == "latin"}
    cyrillic = {index for token, index in pieces.vocabulary.items() if pieces.script(token) == "cyrillic"}
    seen = sorted(latin)[::2]
    uses = expected_uses(pieces, [dict.fromkeys(seen[at::3], 1) for at in range(3)])
    unseen = latin - {*seen}
    assert cyrillic
    assert all(uses[index] == 0 for index in cyrillic)
    assert sum(uses[index] for index in unseen) > 0


def test_scripts_of_whole_and_of_cut_characters():
    assert [script_of_text(text) for text in ("the", "1.", "été", "же", "中", "ひ", "🙂", "ﬀ", "Ａ")] == [
        *("latin", "common", "latin", "cyrillic", "han", "hiragana", "common", "latin", "latin"),
    ]
    assert script_of_bytes("中".encode()[:2]) == "han"
    assert script_of_bytes(b" \xd0") == "cyrillic"
    assert script_of_bytes(b"\x80\x81") == "other"


def test_models_that_split_otherwise_are_refused():
    with pytest.raises(UserError, match="a tokenizer of type WordLevel cannot be made smaller"):
        Pieces.of({"model": {"type": "WordLevel", "vocab": {"a": 0}}}, "here")
    content = content_of(byte_level(300))
    content["model"]["vocab"]["a"] = content["model"]["vocab"]["b"]
    with pytest.raises(UserError, match="two tokens have one id"):
        Pieces.of(content, "here")
