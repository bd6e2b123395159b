"""Which tokens stay, for what the keys say: the story from a tokenizer and texts to the rows that are kept."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ckpt_prune.checkpoint.side_files import side_files_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.bits import Piece, PieceReader, uncut_tokenizer
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.measure.samples.text import read_file, tokenizer_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.stages.vocabulary.choice import Removal, expected_uses, removal_order
from ckpt_prune.stages.vocabulary.files import named_tokens, read_pieces
from ckpt_prune.stages.vocabulary.held_out import WINDOWS, SplitText, count_tokens, spread_pieces
from ckpt_prune.stages.vocabulary.keys import Vocabulary
from ckpt_prune.stages.vocabulary.pieces import Pieces, rebuild
from ckpt_prune.stages.vocabulary.records import TextCost, VocabularyRecord, pack_rows
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
        self._measured: dict[tuple[int, ...], tuple[list[float], int]] = {}
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
    def _parts(self) -> list[Counter[int]]:
        """Counts of the parts of all texts that are counted on."""
        counts: list[Counter[int]] = []
        for text in self.texts:
            for place, part in enumerate(text.parts):
                counts += [Counter()] if place == len(counts) else []
                counts[place].update(count_tokens(self.tokenizer, part))
        return counts

    @cached_property
    def _held(self) -> list[Counter[int]]:
        return [count_tokens(self.tokenizer, text.held) for text in self.texts]

    # ---- what stays ------------------------------------------------------------------------------------------

    @cached_property
    def forced(self) -> set[int]:
        """Rows that stay in any case: bytes and characters, added tokens, and what configs name."""
        checkpoint = self.model.checkpoint
        named = named_tokens(self.pieces, checkpoint.config, self._files, self.rows)
        # Positions of some encoders are counted from the number of the padding token, which must not move.
        padding = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        low = range(padding + 1) if 0 < padding < 8 else range(0)
        spare = {index for token, index in self.pieces.added.items() if _SPARE.fullmatch(token)} - {*named, *low}
        return self._inside(self.pieces.close({*named, *low}) - spare)

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
        wanted = set[int]()
        if keys.scripts or keys.first:
            scripts = {*keys.scripts, COMMON}
            named = [i for t, i in pieces.vocabulary.items() if not keys.scripts or pieces.script(t) in scripts]
            ranks = pieces.ranks
            wanted |= set(sorted(named, key=lambda index: (ranks[index], index))[: keys.first])
        if keys.text:
            if not self.texts:
                raise UserError("vocabulary.text keeps the tokens that a text uses: give --text FILE")
            wanted |= {index for counter in (*self._parts, *self._held) for index in counter}
        if keys.tokens is not None:
            wanted |= read_list(Path(keys.tokens), pieces)
        return self._inside(pieces.close(wanted))

    @property
    def _only_named_stay(self) -> bool:
        """Whether tokens that nothing names go in any case, and a size or a cost says which others do."""
        return self.wanted is not None and (self.keys.size is not None or self.keys.most_cost is not None)

    @cached_property
    def _among(self) -> set[int]:
        """The tokens of which some go."""
        return self.forced.union(self.wanted or ()) if self._only_named_stay else self.all_tokens

    @cached_property
    def removal(self) -> Removal:
        """The order in which tokens go, among those that may."""
        whole = self.forced if self._only_named_stay else self.forced.union(self.wanted or ())
        return removal_order(self.pieces, self._among, expected_uses(self.pieces, self._parts), whole)

    def kept_without(self, gone: int) -> list[int]:
        """Return the rows that stay once the first tokens of the order are gone, in a multiple as the keys want it."""
        removal, step = self.removal, self.keys.multiple_of
        count = len(self._among) - gone
        count += -count % step
        kept = self._among - set(removal.order[: max(0, len(self._among) - count)])
        missing = -len(kept) % step
        if missing:  # rows without a token, and tokens that were not wanted, fill up the last multiple
            ranks = self.pieces.ranks
            others = sorted(self.all_tokens - kept, key=lambda index: (ranks.get(index, -1), index))
            others += [row for row in range(self.rows) if row not in self.all_tokens]
            closed = kept
            for index in others:
                more = self._inside(self.pieces.close({index})) - closed
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
    def _pieces(self) -> list[list[Piece]]:
        each = max(1, WINDOWS // len(self.texts))
        counts = [counter.total() for counter in self._held]
        return [spread_pieces(text.held, count, each) for text, count in zip(self.texts, counts, strict=True)]

    def _read(self, tokenizer: Tokenizer, **rows: Any) -> tuple[list[float], int]:
        """Return the bits of each piece of held-out text, and the tokens of all that count."""
        pieces = [piece for own in self._pieces for piece in own]
        return PieceReader(self._streamed, tokenizer, pieces, **rows).count()

    @cached_property
    def _dense_bits(self) -> tuple[list[float], int]:
        return self._read(self.tokenizer)

    def _bits(self, kept: Sequence[int]) -> tuple[list[float], int]:
        """Return the same with some rows alone: the model reads the same rows, and its head has no others."""
        key = tuple(kept)
        if key not in self._measured:
            back = {new: old for old, new in number_rows(kept, self.pieces.added.values(), self.rows).items()}
            kept_rows = torch.tensor(kept)
            self._measured[key] = self._read(self.smaller_tokenizer(kept), numbers=back, kept=kept_rows)
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
        held = sum(each.total() for each in self._held)
        return self.growth(stay) / held if held else 0.0

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

    def _choose_by_cost(self, allowed: float, say: Callable[[str], None]) -> tuple[list[int], float | None]:
        if not self._predicts:
            return self.kept_without(self._within(allowed)), None
        slope = self._measure_slope()
        best, target = None, allowed / slope
        for _ in range(_TRIES):
            kept = self.kept_without(self._within(target))
            measured = self._loss(kept)
            if measured <= allowed and (best is None or len(kept) < len(best)):
                best = kept
            if _NEAR * allowed <= measured <= allowed or (best is not None and measured > allowed):
                break
            # What was predicted is only as good as its few windows: the next try goes by what was measured.
            target *= min(3.0, max(0.1, 0.9 * allowed / max(measured, allowed / 4)))
        if best is None:
            say(
                f"bits per byte still cost {measured:.2%} with {len(kept):,} tokens, measured on {WINDOWS} windows, "
                f"and at most {allowed:.2%} were allowed: the vocabulary stays as large as it was tried last"
            )
        return best or kept, slope

    def _within(self, share: float, cost: Callable[[int], float] | None = None) -> int:
        """Return how many tokens can go for so many tokens more, as a share."""
        cost = cost or self.cost
        low, high = 0, len(self.removal.order)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(middle) <= share else (low, middle - 1)
        return low

    def _loss(self, kept: Sequence[int]) -> float:
        before, after = sum(self._dense_bits[0]), sum(self._bits(kept)[0])
        return after / before - 1

    def _measure_slope(self) -> float:
        """Return how many per cent of bits a per cent of tokens costs, measured where there are more of these."""
        kept = self.kept_without(self._within(_PILOT, self._held_cost))
        (before, tokens), (after, more) = self._dense_bits, self._bits(kept)
        growth = more / tokens - 1
        lost = sum(after) / sum(before) - 1
        # A token more costs bits in every model: what chance takes away is not relied on.
        return max(0.5, lost / growth) if growth > 0 else 1.0

    def _cost_by_text(self, kept: Sequence[int], slope: float | None) -> list[TextCost]:
        if not self.texts:
            return []
        smaller, costs = self.smaller_tokenizer(kept), []
        before = after = None
        if self._predicts:
            before, after = self._dense_bits[0], self._bits(kept)[0]
        at = 0
        for text, held, own in zip(self.texts, self._held, self._pieces, strict=True):
            part, figures = slice(at, at + len(own)), dict[str, Any]()
            at += len(own)
            tokens = count_tokens(smaller, text.held).total()
            if before is not None and after is not None:
                size = max(1, sum(piece.bytes for piece in own))
                figures = {
                    "bits_before": sum(before[part]) / size,
                    "bits_after": sum(after[part]) / size,
                    "windows": len(own),
                }
            if slope is not None:
                figures["predicted"] = slope * (tokens / held.total() - 1)
            costs.append(
                TextCost(
                    name=text.name,
                    bytes=len(text.held.encode()),
                    tokens_before=held.total(),
                    tokens_after=tokens,
                    **figures,
                )
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
    found = set()
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        if line not in pieces.ids:
            raise UserError(f"{path}, line {number}: {line[:40]!r} is no token of tokenizer.json")
        found.add(pieces.ids[line])
    return found
