"""The tokens of a text's parts are those of the whole, or it is not cut."""

import random
from importlib.resources import files

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from ckpt_prune.measure.samples.text_pieces import _PATTERNS, LONG, split_text
from tests.pairs import one_of

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def bpe(pre: pre_tokenizers.PreTokenizer | None, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """The merges of the embedded model's tokenizer behind another way to cut words."""
    tokenizer = Tokenizer.from_str((files("ckpt_prune") / "demo/model/tokenizer.json").read_text(encoding="utf-8"))
    tokenizer.post_processor = None
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def bert() -> Tokenizer:
    pieces = ["[UNK]", *"abcdes'.1", *(f"##{c}" for c in "abcdes1"), "ab", "##ed", "da"]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


CUT = {
    "bert": bert,
    "gpt2": lambda: bpe(GPT_2),
    "gpt2-nfkc": lambda: bpe(GPT_2, normalizers.NFKC()),
    "digits": lambda: bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2])),
    **{f"pattern {i}": lambda pattern=pattern: bpe(split(pattern)) for i, pattern in enumerate(sorted(_PATTERNS))},
}
WORDS = [
    "def",
    "ab",
    "is",
    "'s",
    "'",
    "1",
    "23",
    ".",
    "...",
    "(",
    "\n",
    "\n\n",
    "\r\n",
    " ",
    "    ",
    "\t",
    "é",
    "e\u0301",
]
WORDS += ["\u0301", "\u2028", "<|endoftext|>", "self", "\u00a0", "文", "'ll", "return"]


@pytest.mark.parametrize("kind", one_of(4, CUT))
def test_parts_have_the_tokens_of_the_whole(kind):
    tokenizer, rng, most = CUT[kind](), random.Random(0), 0
    for _ in range(300):
        text = "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 60)))
        parts = list(split_text(tokenizer, text, long=rng.randint(1, 20)))
        assert "".join(parts) == text
        ids = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).ids]
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids, (text, parts)
        most = max(most, len(parts))
    assert most > 3


def prefix() -> Tokenizer:
    return bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))


def taking_space() -> Tokenizer:
    tokenizer = bpe(GPT_2)
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        prefix,
        taking_space,
        lambda: bpe(pre_tokenizers.Metaspace()),
        lambda: bpe(split(r"\n\w")),
        lambda: bpe(BYTES),
        lambda: bpe(GPT_2, normalizers.Prepend("▁")),
        lambda: None,
    ],
)
def test_others_get_the_whole(tokenizer):
    text = "abc\ndef\n" * 5
    assert list(split_text(tokenizer(), text, long=4)) == [text]


def test_where_there_is_no_place_for_a_cut_there_is_none():
    text = "1\n" * 30
    assert list(split_text(bpe(GPT_2), text, long=4)) == [text]
    assert list(split_text(bpe(GPT_2), "abc\n" * 3, long=LONG)) == ["abc\n" * 3]
