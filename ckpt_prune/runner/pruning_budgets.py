"""Budgets of fewer bits, and of fewer columns and tokens where fewer bits alone lose much.

What a budget is made of is measured when it is asked for first, and stands in a journal then.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from ckpt_prune.budget.choices import BudgetError, solve_each
from ckpt_prune.budget.columns import ColumnLosses
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.runner.column_budgets import ColumnBudgets, column_widths
from ckpt_prune.runner.rounding_trials import RoundingTrials
from ckpt_prune.runner.vocabularies import SmallerVocabulary, Vocabularies

PRUNE_FROM, ENERGY_FROM = 0.15, 0.02
"""Nats that fewer bits alone are predicted to lose, from which on fewer columns are in question, too; and the share of
the energy of hidden states, if there is no head."""
CUT_FROM = 0.05
"""Nats from which on fewer tokens are."""
FEW_BITS = 4
"""Bits a weight below which fewer bits alone will lose so much that columns are in question."""


class Choice(Protocol):
    """What a budget chooses: its bytes, and what it is predicted to lose in nats a token."""

    @property
    def bytes(self) -> int: ...

    @property
    def kl(self) -> float: ...


class Columns(Protocol):
    """The columns that parts of a model may keep: what that loses, and the score by which the others go."""

    @property
    def losses(self) -> ColumnLosses: ...

    @property
    def score(self) -> str: ...


B = TypeVar("B")
"""A budget."""
C = TypeVar("C", bound=Choice)


def will_prune_columns(model: Model, limit: int | None, loss: float | None) -> bool:
    """Return whether columns will be in question for a file of so many bytes, or for a loss in nats a token."""
    if len(column_widths(model)) < 2:
        return False
    if limit is None:
        return (loss or 0.0) > prune_from(model)
    return 8 * limit < FEW_BITS * cost_of(model).parameters


def prune_from(model: Model) -> float:
    """Return the loss of fewer bits alone from which on fewer columns are in question, too."""
    return PRUNE_FROM if model.family.gives_logits else ENERGY_FROM


@dataclass(frozen=True)
class PruningBudgets(RoundingTrials, ABC, Generic[B]):
    """The budgets of a model's file. Losses are in nats a token, or of models without a head shares of an energy.

    Attributes:
        prunes_columns: whether columns will be in question (`will_prune_columns`): what they lose is then measured in
            the same pass over the samples as what fewer bits do.
    """

    prunes_columns: bool = False

    @property
    @abstractmethod
    def fitted(self) -> B:
        """The budget of fewer bits alone, rounded by error feedback."""

    @property
    @abstractmethod
    def joint(self) -> Sequence[B]:
        """Budgets with fewer columns, too, which are predicted when this is asked for first; none if none may go."""

    @abstractmethod
    def with_rows(self, budget: B, vocabulary: SmallerVocabulary) -> B:
        """Return a budget of the model with some of its tokens. Rounding the rows that stay loses as much."""

    @property
    def collected(self) -> tuple[Collect, ...]:
        return ("moments", "gram", "linears") if self.prunes_columns else super().collected

    @cached_property
    def columns(self) -> Columns:
        """The columns that MLPs may keep, and what is predicted to be lost by them."""
        of = self.model, self.samples, self.options.seed, self.folder, self.journal
        return ColumnBudgets(*of, **self.how, measured=self.statistics if self.has_grams else None)

    @cached_property
    def vocabularies(self) -> Vocabularies:
        """The tokens that may stay, and what is lost by the others."""
        return Vocabularies(self.model, self.options, self.journal)

    def least(
        self,
        solve: Callable[[B], C],
        by: Callable[[C], float] = lambda choice: choice.kl,
        may_lose: float = 0.0,
    ) -> C:
        """Return what is best by any budget, the least of `by`; the BudgetError of the last one if none is kept to.

        Fewer tokens and columns are in question where fewer bits alone lose much, or `may_lose` allows much.
        """
        found: list[C] = []
        failed: list[BudgetError] = []

        def lost() -> float:
            return max(may_lose, min((choice.kl for choice in found), default=math.inf))

        def solved(budgets: Sequence[B]) -> list[C]:
            return solve_each(solve, budgets, failed)

        def add_with_fewer_tokens(budgets: Sequence[B]) -> None:
            def cut(vocabulary: SmallerVocabulary) -> list[C]:
                return solved([self.with_rows(budget, vocabulary) for budget in budgets])

            self.vocabularies.add_choices(found, cut, by)

        found += solved([self.fitted])
        if lost() > CUT_FROM:
            add_with_fewer_tokens([self.fitted])
        if lost() > prune_from(self.model):
            found += solved(self.joint)
            add_with_fewer_tokens(self.joint)
        if not found:
            raise failed[-1]
        return min(found, key=by)
