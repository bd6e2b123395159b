"""Texts that are hard to write with few tokens, and whether a smaller tokenizer writes and reads them all the same."""

from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_prune.common.check import Finding

_SENTENCES = (
    "Hello, world! It's 3,141,592 or 2025-11-26; they'll été naïve.\n\n\n\tdef f(x):\n        return x**2\r\n",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ქართული Հայերեն",
    "我能吞下玻璃而不伤身体。私はガラスを食べられます。나는 유리를 먹을 수 있어요. 𠮷野家 㐂 ⿰",
    "אני יכול לאכול זכוכית أنا قادر على أكل الزجاج मैं काँच खा सकता हूँ ฉันกินกระจกได้ நான் កញ្ចក់ ꦧꦱꦗꦮ ᏣᎳᎩ ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 👍🏽 1️⃣ ❤️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ ﬀ ½ ² Å Å é ẹ̊ ‮rtl‬ zero\u200bwidth soft\u00adhyphen \ufeffbom",
    "   leading and trailing   \t\t\n \n  \v\f\x85\u2028\u2029\u3000 nbsp\u00a0 ▁▁ ĠĊ ##ing </w> <0x41> <0xFF>",
)
_PLANES = ((0x00, 0x100), (0x100, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000), (0x2F800, 0x2FA20))
"""Runs of characters; every 37th of the long ones is taken."""


def hard_texts() -> Iterator[str]:
    """Yield sentences in many scripts, emoji, control characters, and characters from all over Unicode."""
    yield from _SENTENCES
    for first, last in _PLANES:
        step = 1 if last - first <= 0x100 else 37
        yield from map(chr, range(first, last, step))
        yield "".join(map(chr, range(first, last, step)))


def compare_tokenizers(ours: Any, theirs: Any, kept: Sequence[int]) -> Finding:
    """Compare a smaller tokenizer with the dense one.

    Special tokens must be the same, with the numbers of their rows. A filled chat template must become the same tokens
    where these stay. Texts that the dense one decodes to what they were must be decoded so by the smaller one, and
    other texts to the same.

    Args:
        kept: dense row of each new one.
    """
    special = [(token, theirs.convert_tokens_to_ids(token)) for token in theirs.all_special_tokens]
    numbers = {old: new for new, old in enumerate(kept)}
    for token, old in special:
        if old in numbers and ours.convert_tokens_to_ids(token) != numbers[old]:
            return False, f"{token} has the number {ours.convert_tokens_to_ids(token)}, and its row is {numbers[old]}"
    texts = [*hard_texts(), *_chat_texts(theirs)]
    same = 0
    for text in texts:
        old, new = (each(text, add_special_tokens=False, verbose=False)["input_ids"] for each in (theirs, ours))
        if all(index in numbers for index in old):
            same += 1
            if [numbers[index] for index in old] != list(new):
                return False, f"{text[:40]!r} has tokens that all stay, and becomes others"
        if _decode(theirs, old) != _decode(ours, new):
            return False, f"{text[:40]!r} is decoded to another text than the dense tokenizer's"
    return True, (
        f"{len(texts)} hard texts are decoded as by the dense tokenizer, {same} of them by the same tokens; "
        f"{len(special)} special tokens have their rows"
    )


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _chat_texts(tokenizer: Any) -> list[str]:
    from ckpt_prune.gguf.tokenizer import fill_chats

    return [*fill_chats(tokenizer).values()]
