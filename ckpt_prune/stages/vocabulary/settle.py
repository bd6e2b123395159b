"""Which tokens stay, for what the keys say: the story from a tokenizer and texts to the rows that are kept."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ckpt_prune.checkpoint.side_files import side_files_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.bits import PieceReader, uncut_tokenizer
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.measure.samples.text import read_file, tokenizer_of
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import parse_config
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.stages.vocabulary.choice import TokenRemoval, expected_uses, removal_order
from ckpt_prune.stages.vocabulary.files import named_tokens, read_pieces
from ckpt_prune.stages.vocabulary.held_out import (
    PREDICTED_WINDOWS,
    WINDOWS,
    SplitText,
    count_tokens,
    piece_tokens,
    spread_pieces,
)
from ckpt_prune.stages.vocabulary.keys import Vocabulary
from ckpt_prune.stages.vocabulary.lost_bits import HeldOutBits, LostBits
from ckpt_prune.stages.vocabulary.pieces import Pieces, rebuild
from ckpt_prune.stages.vocabulary.records import TextCost, VocabularyRecord, pack_rows, unpack_rows
from ckpt_prune.stages.vocabulary.scripts import COMMON
from ckpt_prune.stages.vocabulary.smaller_checkpoint import keep_rows, number_rows, vocabulary_rows

_SPARE = re.compile(r"<unused\d+>|\[unused\d+\]")
"""Added tokens that wait for a use: they go unless a config names them."""
_PILOT = 0.02
"""Tokens more, as a share, at which the bits of one are measured: enough of them in a few windows to be told."""
_NEAR = 0.5
"""A cost that is measured is near enough to what is allowed from this share of it on."""
_TRIES = 4
"""So many vocabularies are measured at most, until the cost of one is within what is allowed, and near it."""


@dataclass(frozen=True)
class Settled:
    """The model with fewer tokens, and what is known of it."""

    model: Model
    record: VocabularyRecord


class VocabularyChoice:
    """Chooses the tokens of a model that stay.

    Args:
        model: with all tokens.
        keys: of the recipe.
        options: with the texts that tokens are counted on and bits are measured on.
        limit: rows that may stay at most, for a size of the whole model; None if there is none.
    """

    def __init__(self, model: Model, keys: Vocabulary, options: SampleOptions, limit: int | None = None) -> None:
        self.model, self.keys, self._options, self._limit = model, keys, options, limit
        self.rows = vocabulary_rows(model)
        self._measured: dict[tuple[int, ...], list[LostBits]] = {}
        self._files = side_files_of(model.checkpoint).files
        self.pieces = read_pieces(model.checkpoint.path, self._files)

    # ---- what is counted -------------------------------------------------------------------------------------

    @cached_property
    def texts(self) -> list[SplitText]:
        """The texts of `--text`."""
        if not self._options.text:
            return []
        tokenizer = tokenizer_of(self.model.checkpoint)
        return [SplitText.of(path.name, read_file(path, tokenizer)[0]) for path in map(Path, self._options.text)]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer with all tokens."""
        return make_tokenizer(self.pieces.content)

    @cached_property
    def _counts(self) -> list[list[Counter[int]]]:
        """Counts of the parts of each text that are counted on."""
        return [[count_tokens(self.tokenizer, part) for part in text.parts] for text in self.texts]

    @cached_property
    def _parts(self) -> list[Counter[int]]:
        """The same of all texts together: each has as many parts."""
        return [sum(same, Counter[int]()) for same in zip(*self._counts, strict=True)]

    @cached_property
    def _expected(self) -> dict[int, float]:
        """How often each token is expected in texts of this kind, as long as those that are counted on."""
        if not self._predicts:
            return expected_uses(self.pieces, self._parts)
        predicted = torch.zeros(self.rows, dtype=torch.float64)
        per_text = max(1, PREDICTED_WINDOWS // len(self.texts))
        for text, counts in zip(self.texts, self._counts, strict=True):
            tokens = sum(counter.total() for counter in counts)
            pieces = spread_pieces(self.tokenizer, "".join(text.parts), piece_tokens(self.model.tokens), per_text)
            reader = PieceReader(
                self._streamed, self.tokenizer, pieces, what="asking the model which tokens it expects"
            )
            expected, predictions = reader.expected_tokens()
            predicted += expected[: self.rows] * (tokens / max(1, predictions))
        return expected_uses(self.pieces, self._parts, predicted.tolist())

    @cached_property
    def _held(self) -> list[Counter[int]]:
        return [count_tokens(self.tokenizer, text.held) for text in self.texts]

    # ---- what stays ------------------------------------------------------------------------------------------

    @cached_property
    def _named(self) -> set[int]:
        """Rows that configs name, and those of tokens whose numbers must not change."""
        checkpoint = self.model.checkpoint
        configs = [checkpoint.config]
        if checkpoint.within is not None:  # with keys that its config.json leaves to its class
            configs.append(parse_config(checkpoint.within.whole.config).to_dict())
        named = named_tokens(self.pieces, configs, self._files, self.rows)
        # Positions of some encoders are counted from the number of the padding token, which must not move.
        padding = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        return {*named, *(range(padding + 1) if 0 < padding < 8 else ())}

    @cached_property
    def forced(self) -> set[int]:
        """Rows that stay in any case: bytes and characters, added tokens, and what configs name."""
        return self._close(self._named)

    @cached_property
    def _spare(self) -> set[int]:
        """Added tokens that wait for a use."""
        return {index for token, index in self.pieces.added.items() if _SPARE.fullmatch(token)} - self._named

    def _close(self, ids: set[int]) -> set[int]:
        """Return rows with those that must stay beside them, but not with added tokens that wait for a use."""
        return self._inside(ids | (self.pieces.close(ids) - self._spare))

    def _inside(self, ids: set[int]) -> set[int]:
        return {index for index in ids if index < self.rows}

    @cached_property
    def all_tokens(self) -> set[int]:
        """Rows that a token has."""
        return self._inside({*self.pieces.ids.values()}) | self.forced

    @cached_property
    def wanted(self) -> set[int] | None:
        """The tokens that scripts, rank, text and a list name; None if nothing names any."""
        keys, pieces = self.keys, self.pieces
        if not keys.names_tokens:
            return None
        ids = set[int]()
        if keys.scripts or keys.first:
            scripts = {*keys.scripts, COMMON}
            named = [i for t, i in pieces.vocabulary.items() if not keys.scripts or pieces.script(t) in scripts]
            named, ranks = [index for index in named if index not in self._spare], pieces.ranks
            ids |= set(sorted(named, key=lambda index: (ranks[index], index))[: keys.first])
        if keys.text:
            if not self.texts:
                raise UserError("vocabulary.text keeps the tokens that a text uses: give --text FILE")
            ids |= {index for counter in (*self._parts, *self._held) for index in counter}
        if keys.tokens is not None:
            ids |= read_list(Path(keys.tokens), pieces)
        return self._close(ids)

    @property
    def _only_named_stay(self) -> bool:
        """Whether tokens that nothing names go in any case, and a size or a cost says which others do."""
        return self.wanted is not None and (self.keys.size is not None or self.keys.most_cost is not None)

    @cached_property
    def _among(self) -> set[int]:
        """The tokens of which some go."""
        return self.forced.union(self.wanted or ()) if self._only_named_stay else self.all_tokens

    @cached_property
    def removal(self) -> TokenRemoval:
        """The order in which tokens go, among those that may."""
        whole = self.forced if self._only_named_stay else self.forced.union(self.wanted or ())
        return removal_order(self.pieces, self._among, self._expected, whole)

    def kept_without(self, gone: int) -> list[int]:
        """Return the rows that stay once the first tokens of the order are gone, in a multiple as the keys want it."""
        removal, step = self.removal, self.keys.multiple_of
        count = len(self._among) - gone
        count += -count % step
        kept = self._among - set(removal.order[: max(0, len(self._among) - count)])
        missing = -len(kept) % step
        if missing:  # rows without a token, and tokens that were not wanted, fill up the last multiple
            ranks = self.pieces.ranks
            others = sorted(self.all_tokens - kept - self._spare, key=lambda index: (ranks.get(index, -1), index))
            others += sorted(self._spare - kept)
            others += [row for row in range(self.rows) if row not in self.all_tokens]
            closed = kept
            for index in others:
                more = self._close({index}) - closed
                if len(closed) + len(more) <= len(kept) + missing:
                    closed = closed | more
            kept = closed
        return sorted(kept)

    # ---- what it costs ---------------------------------------------------------------------------------------

    @property
    def _predicts(self) -> bool:
        """Whether bits can be measured: there is text, and the model predicts it."""
        return bool(self.texts) and self.model.family.causal and self.model.family.gives_logits

    @cached_property
    def _streamed(self) -> StreamedModel:
        device = resolve_device(getattr(self._options, "device", "auto"))
        dtype = resolve_compute_dtype(self._options.compute_dtype, device, self.model.dtype)
        return StreamedModel(self.model, device, dtype)

    @cached_property
    def _bits(self) -> HeldOutBits:
        return HeldOutBits(self._streamed, self.tokenizer, self.texts)

    def _lost(self, kept: Sequence[int]) -> list[LostBits]:
        """Return what it costs, by text, to keep some rows alone, which are all that the head has then."""
        key = tuple(kept)
        if key not in self._measured:
            back = {new: old for old, new in number_rows(kept, self.pieces.added.values(), self.rows).items()}
            self._measured[key] = self._bits.lost(self.smaller_tokenizer(kept), kept, back)
        return self._measured[key]

    def smaller_tokenizer(self, kept: Sequence[int]) -> Tokenizer:
        return make_tokenizer(rebuild(self.pieces, number_rows(kept, self.pieces.added.values(), self.rows)))

    def growth(self, stay: set[int]) -> int:
        """Return how many tokens more the held-out texts take, by the splits of those that go."""
        pieces = self.pieces
        counts = sum(self._held, Counter[int]())
        return sum(n * (len(pieces.expand(i, stay)) - 1) for i, n in counts.items() if i not in stay)

    def cost(self, gone: int) -> float:
        """Return the tokens more, as a share, without the first tokens of the order: expected, or held out if more."""
        counted = sum(each.total() for each in self._parts)
        expected = self.removal.growth[gone - 1] / counted if gone and counted else 0.0
        return max(expected, self._held_cost(gone))

    def _held_cost(self, gone: int) -> float:
        stay = self._among.difference(self.removal.order[:gone])
        tokens = sum(each.total() for each in self._held)
        return self.growth(stay) / tokens if tokens else 0.0

    def rows_of(self, count: int) -> list[int]:
        """Return the rows that stay of so many, a few more if these must."""
        return self.kept_without(max(0, len(self._among) - count))

    def price(self, kept: Sequence[int]) -> float:
        """Return what it costs that some rows alone stay, nats a token of the held-out text as all tokens write it."""
        more = sum(each.more for each in self._lost(kept))
        return more * log(2) / sum(each.total() for each in self._held)

    # ---- the choice ------------------------------------------------------------------------------------------

    def settle(self, say: Callable[[str], None]) -> Settled:
        """Choose, and measure what the choice costs."""
        kept, slope = self._choose(say)
        if len(kept) < 2:
            raise UserError(f"a vocabulary of {len(kept)} tokens says nothing: keep more")
        texts = self._cost_by_text(kept, slope)
        model = keep_rows(self.model, self.pieces, kept)
        record = VocabularyRecord(
            kind=self.pieces.kind,
            rows=self.rows,
            tokens=len(self.all_tokens),
            rows_kept=len(kept),
            kept=pack_rows(kept),
            left_out=sorted(name for name, new in model.checkpoint.rewritten.items() if new is None),
            texts=texts,
        )
        return Settled(model, record)

    def _choose(self, say: Callable[[str], None]) -> tuple[list[int], float | None]:
        """Return the rows that stay, and the bits of one token more as a share of those of the text."""
        keys, size = self.keys, self._limit
        if keys.kept is not None:
            return self._given(keys.kept), None
        if size is not None:
            step = keys.multiple_of
            size = size // step * step
        elif keys.size is not None:
            size = keys.count(len(self.all_tokens))
        if size is not None:
            order = self.removal.order
            least = len(self._among) - len(order)
            if size < least:
                raise UserError(
                    f"a vocabulary of {size:,} tokens is asked for, and {least:,} must stay: bytes and characters, "
                    "special tokens, and those that configs name"
                )
            return self.kept_without(max(0, len(self._among) - size)), None
        if keys.most_cost is None:
            return self.kept_without(len(self.removal.order)), None
        if not self.texts:
            raise UserError(
                f"the smallest vocabulary that costs at most {keys.most_cost:.3g} of bits per byte is found on text: "
                "give --text FILE, or say what stays: --vocabulary 50%, 24000, latin …"
            )
        return self._choose_by_cost(keys.most_cost, say)

    def _given(self, packed: str) -> list[int]:
        """Return the rows that the recipe names, which must be a vocabulary of this model."""
        rows = unpack_rows(packed)
        kept = set(rows)
        if self._limit is not None:
            raise UserError("vocabulary.kept says which tokens stay: a size beside it says nothing")
        if rows[-1] >= self.rows or not self.forced <= kept or self._close(kept) != kept:
            raise UserError(
                "vocabulary.kept names rows of another model: some are no tokens here, or lack tokens that must stay"
            )
        return rows

    def _choose_by_cost(self, allowed: float, say: Callable[[str], None]) -> tuple[list[int], float | None]:
        if not self._predicts:
            return self.kept_without(self._within(allowed)), None
        first = slope = self._slope(self._within(_PILOT, self._held_cost)) or 1.0
        best: list[int] | None = None
        for _ in range(_TRIES):
            gone = self._within(allowed / slope)
            kept = self.kept_without(gone)
            # What a token costs is measured where these are gone, and counts for all that are expected.
            slope = self._slope(gone) or slope
            measured = slope * self.cost(gone)
            if measured <= allowed and (best is None or len(kept) < len(best)):
                best = kept
            if _NEAR * allowed <= measured <= allowed:
                break
        if best is None:
            say(
                f"bits per byte still cost {measured:.2%} with {len(kept):,} tokens, measured on {WINDOWS} windows, "
                f"and at most {allowed:.2%} were allowed: the vocabulary stays as large as it was tried last"
            )
        return best or kept, first

    def _within(self, share: float, cost: Callable[[int], float] | None = None) -> int:
        """Return how many tokens can go for so many tokens more, as a share."""
        cost = cost or self.cost
        low, high = 0, len(self.removal.order)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(middle) <= share else (low, middle - 1)
        return low

    def _slope(self, gone: int) -> float | None:
        """Return how many per cent of bits a per cent of tokens costs, measured; None if no text takes more tokens."""
        growth, costs = self._held_cost(gone), self._lost(self.kept_without(gone))
        lost = sum(each.more for each in costs) / sum(self._bits.dense)
        # A token more costs bits in every model: what chance takes away is not relied on.
        return max(0.5, lost / growth) if growth > 0 else None

    def _cost_by_text(self, kept: Sequence[int], slope: float | None) -> list[TextCost]:
        if not self.texts or self.keys.kept is not None:
            return []
        smaller, costs = self.smaller_tokenizer(kept), []
        none = [None] * len(self.texts)
        dense, lost = (self._bits.dense, self._lost(kept)) if self._predicts else (none, none)
        for text, held, before, bits in zip(self.texts, self._held, dense, lost, strict=True):
            tokens, figures = count_tokens(smaller, text.held).total(), dict[str, Any]()
            size = len(text.held.encode())
            if before is not None and bits is not None:
                figures = {"bits_before": before / size, "bits_after": (before + bits.more) / size}
                figures["windows"] = bits.windows
            if slope is not None:
                figures["predicted"] = slope * (tokens / held.total() - 1)
            costs.append(
                TextCost(name=text.name, bytes=size, tokens_before=held.total(), tokens_after=tokens, **figures)
            )
        return costs


def make_tokenizer(content: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json's content (`uncut_tokenizer`)."""
    return uncut_tokenizer(json.dumps(content))


def read_list(path: Path, pieces: Pieces) -> set[int]:
    """Read a file with one token a line, as tokenizer.json writes it. UserError for a line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the list of tokens cannot be read: {error}") from error
    ids = set()
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        if line not in pieces.ids:
            raise UserError(f"{path}, line {number}: {line[:40]!r} is no token of tokenizer.json")
        ids.add(pieces.ids[line])
    return ids
