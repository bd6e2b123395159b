"""Smaller vocabularies for a file: what they cost, and how their tokens write a text."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from math import prod
from typing import TypeVar

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.side_files import side_files_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.stages.vocabulary.files import read_pieces
from ckpt_prune.stages.vocabulary.keys import Vocabulary
from ckpt_prune.stages.vocabulary.records import pack_rows, unpack_rows
from ckpt_prune.stages.vocabulary.settle import VocabularyChoice
from ckpt_prune.stages.vocabulary.smaller_checkpoint import keep_rows, number_rows, vocabulary_rows, vocabulary_tensors

SHARES = (75, 50, 25, 12)
"""Per cent of the rows of the embedding that are in question, besides all of them."""
LEAST_OF_FORESEEN = 0.5
"""A vocabulary is measured if it helps at this share of the price that is foreseen."""
_LEAST_PART = 0.2
"""Share of the parameters from which on an embedding is large enough to be in question."""
_VOCABULARIES = "smaller vocabularies"
"""Entry of the journal."""
C = TypeVar("C")
"""A choice."""


@dataclass(frozen=True)
class SmallerVocabulary:
    """Some tokens of a model.

    Attributes:
        kept: rows of the embedding that stay, ascending.
        lost: what the absence of the others costs, nats a token of text as all tokens write it.
    """

    kept: Sequence[int]
    lost: float


def may_lose_tokens(model: Model, options: SampleOptions) -> bool:
    """Return whether fewer tokens are in question: the embedding is a large part of a model that generates text.

    None are where all shall stay. The price of a token is what text costs more without it, by the model's predictions.
    """
    family = model.family
    if getattr(options, "all_tokens", False) or not (family.causal and family.gives_logits):
        return False
    embedding = model.checkpoint.tensors[model.family.embedding_weight]
    return prod(embedding.shape) >= _LEAST_PART * cost_of(model).parameters


def tables_in_question(model: Model, options: SampleOptions) -> frozenset[str]:
    """Return the tensors with a row for each token; none if the embedding is a small part, or no token may go."""
    try:
        return vocabulary_tensors(model) if may_lose_tokens(model, options) else frozenset()
    except UserError:  # as of models with code of their own
        return frozenset()


def least_share(model: Model, options: SampleOptions) -> Fraction:
    """Return the least share of a model's tokens that is in question; 1 if all stay."""
    return Fraction(SHARES[-1], 100) if tables_in_question(model, options) else Fraction(1)


@dataclass(frozen=True)
class Vocabularies:
    """Smaller vocabularies of a model, each priced on `--text` when it is asked for first, the largest first.

    There are none if the embedding is a small part of the model, or all tokens shall stay. A line says so if its
    tokenizer cannot be made smaller, or the text is too short to hold a part of it out.

    Attributes:
        options: name the text, and may say that all tokens stay.
        journal: of what is priced.
    """

    model: Model
    options: SampleOptions
    journal: Journal

    @property
    def priced(self) -> list[SmallerVocabulary]:
        """Those whose cost is known."""
        notes = self.journal.notes.get(_VOCABULARIES, [])
        return [SmallerVocabulary(unpack_rows(kept), lost) for kept, lost in notes]

    def kept_rows(self, rows: int | None) -> Sequence[int] | None:
        """Return the tokens of the one that has so many; None if all stay."""
        return next((each.kept for each in self.priced if len(each.kept) == rows), None)

    def add_choices(
        self, found: list[C], solve: Callable[[SmallerVocabulary], list[C]], by: Callable[[C], float]
    ) -> None:
        """Add to choices those with fewer tokens, as long as the least of `by` falls.

        Args:
            solve: returns the choices with a vocabulary, none if none is within a budget.
        """

        def best(choices: Sequence[C]) -> float:
            return min(map(by, choices), default=math.inf)

        def helps(vocabulary: SmallerVocabulary) -> bool:
            return not found or best(solve(vocabulary)) < best(found)

        for each in self._each(helps):
            before, fewer = best(found), solve(each)
            found.extend(fewer)
            if math.isfinite(before) and best(fewer) >= before:  # each further token costs more, and saves as much
                return

    def _each(self, helps: Callable[[SmallerVocabulary], bool]) -> Iterator[SmallerVocabulary]:
        yield from self.priced
        while (each := self._price_next(helps)) is not None:
            known = self.journal.notes.get(_VOCABULARIES, [])
            self.journal.record(_VOCABULARIES, note=[*known, [pack_rows(each.kept), each.lost]])
            yield each

    @cached_property
    def _choice(self) -> VocabularyChoice | None:
        if not may_lose_tokens(self.model, self.options):
            return None
        try:
            choice = VocabularyChoice(self.model, Vocabulary.model_validate({}), self.options)
            keep_rows(self.model, choice.pieces, choice.kept_without(0))
        except UserError as error:
            Notices()(f"no smaller vocabulary is tried: {error}")
            return None
        return choice

    def _price_next(self, helps: Callable[[SmallerVocabulary], bool]) -> SmallerVocabulary | None:
        """Return the next one; None if there is none, or if it is not worth its price.

        `helps` is asked with a share of what it would cost if each further token of the text cost as much as those
        that the last one adds.
        """
        priced = self.priced
        choice = self._choice if len(priced) < len(SHARES) else None
        if choice is None:
            return None
        try:
            kept = choice.rows_of(vocabulary_rows(self.model) * SHARES[len(priced)] // 100)
            if priced and (grown := choice.growth({*priced[-1].kept})):
                foreseen = priced[-1].lost * choice.growth({*kept}) / grown
                if not helps(SmallerVocabulary(kept, LEAST_OF_FORESEEN * foreseen)):
                    return None
            return SmallerVocabulary(kept, max(0.0, choice.price(kept)))
        except UserError as error:
            Notices()(f"no smaller vocabulary is tried: {error}")
            return None


def parts_of_tokens(model: Model, kept: Sequence[int]) -> Callable[[int], list[int]]:
    """Return a function from a token of a model to the tokens, by their new numbers, that stand in its place.

    Args:
        model: with all tokens.
        kept: rows that stay, ascending.
    """
    pieces = read_pieces(model.checkpoint.path, side_files_of(model.checkpoint).files)
    numbers, stay = number_rows(kept, pieces.added.values(), vocabulary_rows(model)), set(kept)

    @cache
    def parts(token: int) -> list[int]:
        return [numbers[part] for part in pieces.expand(token, stay)]

    return parts
