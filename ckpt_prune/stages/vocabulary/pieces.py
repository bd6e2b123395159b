"""The tokens of tokenizer.json: which there are, which must stay, and into what a text splits without one.

Pure functions of the file's content. Four models are known: BPE over bytes, BPE with byte fallback or without,
Unigram, and WordPiece.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from ckpt_prune.common.errors import UserError
from ckpt_prune.stages.vocabulary.scripts import COMMON, script_of_bytes, script_of_text

Kind = Literal["byte-level BPE", "BPE", "Unigram", "WordPiece"]
Merge = tuple[str, str]
_SPACES = "▁Ġ"


@dataclass(frozen=True)
class Pieces:
    """The tokens of a tokenizer.json, by the model that makes them.

    Attributes:
        content: of the file.
        kind: of its model.
    """

    content: Mapping[str, Any]
    kind: Kind

    @classmethod
    def of(cls, content: Mapping[str, Any], where: object) -> "Pieces":
        """Read a tokenizer.json. UserError if its model is none of the four, or its tokens have no ids of their own."""
        model = content.get("model")
        name = model.get("type") if isinstance(model, dict) else None
        if isinstance(model, dict) and name is None:  # files of former versions do not say
            name = "BPE" if "merges" in model else "Unigram" if isinstance(model.get("vocab"), list) else "WordPiece"
        if name not in ("BPE", "Unigram", "WordPiece") or not model or not model.get("vocab"):
            raise UserError(
                f"{where}: a tokenizer of type {name} cannot be made smaller: BPE, Unigram and WordPiece can"
            )
        byte_level = name == "BPE" and _names(content, "ByteLevel")
        pieces = cls(content, "byte-level BPE" if byte_level else name)
        if len({*pieces.ids.values()}) < len(pieces.ids):
            raise UserError(f"{where}: two tokens have one id; take the tokenizer as it was published")
        return pieces

    @property
    def model(self) -> Mapping[str, Any]:
        return self.content["model"]  # type: ignore[no-any-return]

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The model's own tokens → their ids."""
        vocabulary = self.model["vocab"]
        if isinstance(vocabulary, Mapping):
            return dict(vocabulary)
        return {token: index for index, (token, _) in enumerate(vocabulary)}

    @cached_property
    def added(self) -> dict[str, int]:
        """Tokens that are cut out of a text before the model sees it → their ids."""
        return {each["content"]: each["id"] for each in self.content.get("added_tokens") or ()}

    @cached_property
    def ids(self) -> dict[str, int]:
        """All tokens → their ids."""
        return {**self.vocabulary, **self.added}

    @cached_property
    def names(self) -> dict[int, str]:
        """Id → token."""
        return {index: token for token, index in self.ids.items()}

    @cached_property
    def scores(self) -> dict[str, float]:
        """Tokens of a Unigram model → log-probabilities."""
        return dict(self.model["vocab"]) if self.kind == "Unigram" else {}

    @cached_property
    def pairs(self) -> list[Merge]:
        """The merges as they are listed: pairs of tokens that become one."""
        pairs = (each if isinstance(each, list) else each.split(" ", 1) for each in self.model.get("merges") or ())
        return [(left, right) for left, right in pairs]

    @cached_property
    def merges(self) -> dict[Merge, int]:
        """Pairs of tokens that become one → their rank, the first one 0."""
        return {pair: rank for rank, pair in enumerate(self.pairs)}

    @cached_property
    def falls_back(self) -> bool:
        """Whether a character that is no token becomes the tokens of its bytes."""
        return bool(self.model.get("byte_fallback")) and all(_byte(each) in self.vocabulary for each in range(256))

    @cached_property
    def _prefix(self) -> str:
        if self.kind == "WordPiece":
            return str(self.model.get("continuing_subword_prefix", "##"))
        return str(self.model.get("continuing_subword_prefix") or "")

    @cached_property
    def _suffix(self) -> str:
        return str(self.model.get("end_of_word_suffix") or "")

    def join(self, left: str, right: str) -> str:
        """Return the token that a merge makes."""
        return left + right.removeprefix(self._prefix)

    # ---- text --------------------------------------------------------------------------------------------------

    def script(self, token: str) -> str:
        """Return the script of a token (`scripts`)."""
        if self.kind == "byte-level BPE":
            return script_of_bytes(bytes(_BYTES[each] for each in token if each in _BYTES))
        if self.falls_back and token in self._byte_tokens:
            return COMMON
        return script_of_text(token.removeprefix(self._prefix).removesuffix(self._suffix).strip(_SPACES))

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for bytes where characters are no tokens; none if there is no such fallback."""
        return frozenset(map(self.vocabulary.__getitem__, self._byte_tokens)) if self.falls_back else frozenset()

    @cached_property
    def _byte_tokens(self) -> frozenset[str]:
        return frozenset(map(_byte, range(256)))

    # ---- what has to stay -------------------------------------------------------------------------------------

    @cached_property
    def needed(self) -> set[int]:
        """Ids without which some text could no longer be written as before: bytes, characters, unknown."""
        unknown = self.model.get("unk_token")
        needed = {self.vocabulary[unknown]} if unknown in self.vocabulary else set()
        if self.kind == "Unigram":
            number = self.model.get("unk_id")
            needed |= set() if number is None else {number}
            # An unknown character costs a fixed amount more than the least likely token.
            needed.add(self.vocabulary[min(self.scores, key=self.scores.__getitem__)])
        if self.falls_back:
            needed |= {self.vocabulary[token] for token in self._byte_tokens}
        return needed | {index for token, index in self.vocabulary.items() if self._is_least(token)}

    def _is_least(self, token: str) -> bool:
        """Whether a token must stay because nothing smaller could stand in for it."""
        if self.kind == "byte-level BPE":
            return len(token) == 1
        text = token.removeprefix(self._prefix).removesuffix(self._suffix)
        if len(text) <= 1:
            # The sign for a space is read as one only where it is a token.
            return not self.falls_back or text in ("", _SPACES[0])
        if self.kind in ("WordPiece", "Unigram") and not self.falls_back:
            return any(symbol not in self.vocabulary for symbol in self.symbols(token))
        return False

    def symbols(self, token: str) -> list[str]:
        """Return the tokens of the characters that a token is made of."""
        inner, suffix = token, self._suffix
        continues = bool(self._prefix) and token.startswith(self._prefix) and token != self._prefix
        inner = inner.removeprefix(self._prefix) if continues else inner
        ends = bool(suffix) and inner.endswith(suffix) and inner != suffix
        characters = list(inner.removesuffix(suffix) if ends else inner)
        marked = [f"{self._prefix}{each}" if place or continues else each for place, each in enumerate(characters)]
        return [*marked[:-1], f"{marked[-1]}{suffix}"] if ends else marked

    # ---- what a token becomes without itself ------------------------------------------------------------------

    @cached_property
    def splits(self) -> dict[int, tuple[int, ...]]:
        """Id → the ids of the tokens that stand in its place once it is gone, each with splits of its own or a byte.

        In BPE these are the two that its last merge joins (`derive`), or the bytes of a character. In Unigram they are
        the most likely split into others, in WordPiece the one by longest first. Tokens that must stay have none, and
        neither has a token that no text becomes.
        """
        split = {"Unigram": self._split_by_score, "WordPiece": self._split_by_length}.get(self.kind, self._split_merge)
        splits: dict[int, tuple[int, ...]] = {}
        for token, index in self.vocabulary.items():
            if index in self.needed or token in self.added:
                continue
            tokens = split(token)
            if tokens is not None:
                splits[index] = tuple(self.vocabulary[each] for each in tokens)
        return splits

    @property
    def closed(self) -> bool:
        """Whether a token can be made only while those that it splits into stay: so it is where merges make it."""
        return self.kind in ("BPE", "byte-level BPE")

    def derive(self, token: str) -> list[Merge]:
        """Return the merges that BPE applies to the characters of a token, in order.

        The merge of least rank comes first, the leftmost of equals. Text in which the token stands makes it by the
        same merges: none that crosses its ends was applied, or it would not be there.
        """
        symbols, rank, none, applied = self.symbols(token), self.merges.get, len(self.pairs), list[Merge]()
        ranks = [rank(pair, none) for pair in pairwise(symbols)]
        while ranks and (best := min(ranks)) < none:
            place = ranks.index(best)
            applied.append((symbols[place], symbols[place + 1]))
            symbols[place : place + 2] = [self.join(*applied[-1])]
            del ranks[place]
            for at in range(max(0, place - 1), min(place + 1, len(ranks))):
                ranks[at] = rank((symbols[at], symbols[at + 1]), none)
        return applied

    def _split_merge(self, token: str) -> tuple[str, ...] | None:
        symbols = self.symbols(token)
        if len(symbols) == 1:
            return self._bytes_of(token) if self.falls_back else None
        if any(each not in self.vocabulary for each in symbols):
            return None
        applied = self.derive(token)
        return applied[-1] if applied and self.join(*applied[-1]) == token else None

    def _bytes_of(self, character: str) -> tuple[str, ...]:
        return tuple(_byte(each) for each in character.encode(errors="surrogatepass"))

    def _split_by_score(self, token: str) -> tuple[str, ...] | None:
        """Return the split into other tokens of the largest sum of scores (Viterbi), or bytes of one character."""
        if len(token) == 1:
            return self._bytes_of(token) if self.falls_back else None
        scores, longest = self.scores, self._longest
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(token) + 1):
            split = (float("-inf"), -1)
            for start in range(max(0, end - longest), end):
                score = scores.get(token[start:end])
                if score is not None and best[start][1] >= 0 and end - start < len(token):
                    split = max(split, (best[start][0] + score, start))
            best.append(split)
        pieces, end = [], len(token)
        while end > 0:
            start = best[end][1]
            if start < 0:
                return None
            pieces.append(token[start:end])
            end = start
        return tuple(reversed(pieces))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.vocabulary))

    def _split_by_length(self, token: str) -> tuple[str, ...] | None:
        """Return the split into other tokens that takes the longest first."""
        prefix = self._prefix
        continues = token.startswith(prefix) and token != prefix
        text, pieces = token.removeprefix(prefix) if continues else token, []
        while text:
            start = prefix if continues else ""
            ends = (end for end in range(len(text), 0, -1) if f"{start}{text[:end]}" in self.vocabulary)
            end = next((each for each in ends if f"{start}{text[:each]}" != token), 0)
            if not end:
                return None
            pieces.append(f"{start}{text[:end]}")
            text, continues = text[end:], True
        return tuple(pieces)

    def close(self, kept: Iterable[int]) -> set[int]:
        """Return some ids with those that must stay, and those without which one of them could not be made."""
        closed = {*kept, *self.needed, *self.added.values()}
        if not self.closed:
            return closed
        unread = list(closed)
        while unread:
            for part in self.splits.get(unread.pop(), ()):
                if part not in closed:
                    closed.add(part)
                    unread.append(part)
        return closed

    def expand(self, index: int, kept: set[int]) -> list[int]:
        """Return the kept ids that a token becomes, by its splits."""
        if index in kept or index not in self.splits:
            return [index]
        return [each for part in self.splits[index] for each in self.expand(part, kept)]

    @cached_property
    def ranks(self) -> dict[int, float]:
        """Id → how early the tokenizer's maker chose it: rank of its merge, likelihood, or its id. The least is first.

        Tokens that no merge makes come first of a BPE's.
        """
        if self.kind == "Unigram":
            return {self.vocabulary[token]: -score for token, score in self.scores.items()}
        if self.kind == "WordPiece":
            return {index: float(index) for index in self.vocabulary.values()}
        rank_of = dict.fromkeys(self.vocabulary.values(), -1.0)
        for merge, rank in self.merges.items():
            index = self.vocabulary.get(self.join(*merge))
            if index is not None and rank_of[index] < 0:
                rank_of[index] = float(rank)
        return rank_of


# ---- rebuilding -----------------------------------------------------------------------------------------------------


def rebuild(pieces: Pieces, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return the tokenizer.json of fewer tokens.

    Normaliser, pre-tokenizer, decoder and the model's switches stay as they are.

    Args:
        numbers: old id of every token that stays → its new one.
    """
    model = dict(pieces.model)
    vocabulary = {token: numbers[index] for token, index in pieces.vocabulary.items() if index in numbers}
    if isinstance(model["vocab"], Mapping):
        model["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    else:
        model["vocab"] = [[token, score] for token, score in model["vocab"] if token in vocabulary]
        if model.get("unk_id") is not None:
            model["unk_id"] = vocabulary[pieces.names[model["unk_id"]]]
    if "merges" in model:
        model["merges"] = [
            merge
            for merge, (left, right) in zip(model["merges"], pieces.pairs, strict=True)
            if left in vocabulary and right in vocabulary and pieces.join(left, right) in vocabulary
        ]
    added = [
        each | {"id": numbers[each["id"]]} for each in pieces.content.get("added_tokens") or () if each["id"] in numbers
    ]
    return {
        **pieces.content,
        "model": model,
        "added_tokens": sorted(added, key=lambda each: each["id"]),
        "post_processor": map_processor(pieces.content.get("post_processor"), numbers.__getitem__),
        "padding": _renumber_padding(pieces.content.get("padding"), numbers),
    }


def _renumber_padding(padding: Any, numbers: Mapping[int, int]) -> Any:
    return padding | {"pad_id": numbers.get(padding["pad_id"], 0)} if isinstance(padding, dict) else padding


def map_processor(step: Any, change: Callable[[int], int]) -> Any:
    """Return a post-processor with the tokens changed that it puts around a text. Args: `files.map_tokens`."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Sequence":
        return step | {"processors": [map_processor(each, change) for each in step["processors"]]}
    if step.get("type") == "TemplateProcessing":
        special = {
            name: each | {"ids": [change(index) for index in each["ids"]]}
            for name, each in step["special_tokens"].items()
        }
        return step | {"special_tokens": special}
    return step | {key: [step[key][0], change(step[key][1])] for key in ("sep", "cls") if key in step}


def _names(value: Any, name: str) -> bool:
    """Whether a step of this type is anywhere in a tokenizer.json, but in its vocabulary."""
    if isinstance(value, Mapping):
        return value.get("type") == name or any(_names(each, name) for key, each in value.items() if key != "vocab")
    return isinstance(value, list) and len(value) < 1000 and any(_names(each, name) for each in value)


def _byte(value: int) -> str:
    return f"<0x{value:02X}>"


def byte_letters() -> dict[str, int]:
    """Return the letter that a byte-level tokenizer writes for each byte → the byte (GPT-2's table)."""
    printable: Sequence[int] = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + at): value for at, value in enumerate(others)}


_BYTES = byte_letters()
