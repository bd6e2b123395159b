"""The bytes and the predicted loss of every type of a matrix and every width of an MLP in a GGUF file.

`frontier` makes the file that these figures favour and measures it; `prune --target-bytes … --for llama.cpp` makes it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.gguf.architectures import takes_different_blocks
from ckpt_prune.gguf.choosing import TypeBudget, TypeChoice
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.importance import importance_of_statistics
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.losses import TypeLosses, predict_type_losses, types_for
from ckpt_prune.gguf.timing import FileTimes, time_types
from ckpt_prune.gguf.types import OUTER
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.recipe.sizes import Timed
from ckpt_prune.runner.column_budgets import MOST_COLUMNS, ColumnBudgets, column_widths
from ckpt_prune.runner.rounding_trials import RoundingTrials
from ckpt_prune.runner.vocabularies import (
    SHARES,
    SmallerVocabulary,
    is_embedding_large,
    plan_with_rows,
    price_vocabularies,
)
from ckpt_prune.stages.spaces.effects.column_losses import SPACE
from ckpt_prune.stages.vocabulary.records import pack_rows, unpack_rows

PRUNE_FROM = 0.15
"""Nats that fewer bits alone are predicted to lose, from which on fewer columns are in question, too."""
CUT_FROM = 0.05
"""Nats from which on fewer tokens are."""
HEAD = 4096
"""Bytes that the head of a file may grow by where blocks differ in width."""
_LOSSES = "losses of types"
_VOCABULARIES = "smaller vocabularies"
_TIMES = "times of types"
"""Entries of the journal."""


@dataclass(frozen=True)
class FileBudgets(RoundingTrials):
    """The budgets of a model's file.

    Attributes:
        planner: of the model's files.
    """

    planner: FilePlanner
    _narrow: dict[int, FilePlanner] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _losses(self) -> TypeLosses:
        notes = self.journal.notes
        statistics = Statistics(self.statistics)
        if _LOSSES not in notes:
            importance = importance_of_statistics(statistics, self.model, "q8_0")
            predicted = predict_type_losses(self.model, self.few, importance, "q8_0", grams=self.grams(), **self.how)
            self.journal.record(_LOSSES, note=predicted.note())
        return TypeLosses.read(notes[_LOSSES])

    @cached_property
    def types(self) -> TypeBudget:
        """The budget of types that are rounded by importance, with all columns."""
        return TypeBudget(self.planner, self._losses.weighed, fitted=True)

    @cached_property
    def fitted(self) -> TypeBudget:
        """The budget of types that are rounded by error feedback."""
        return replace(self.types, losses=self._losses.fitted)

    @cached_property
    def joint(self) -> TypeBudget:
        """The budget of types and columns together; of types alone where MLPs differ or have few columns.

        Fewer columns are predicted when it is asked for first.
        """
        losses = self.columns.losses
        return replace(self.fitted, columns=losses, alike=not self._may_differ) if losses else self.fitted

    @cached_property
    def columns(self) -> ColumnBudgets:
        """The columns that MLPs may keep, and what is predicted to be lost by them."""
        return ColumnBudgets(self.model, self.samples, self.options.seed, self.folder, self.journal, **self.how)

    @property
    def _may_differ(self) -> bool:
        tied = "output.weight" not in lay_out(self.model).tensors
        return takes_different_blocks(str(self.model.checkpoint.config["model_type"]), tied=tied)

    @property
    def _priced(self) -> list[SmallerVocabulary]:
        """Smaller vocabularies whose cost is known, the largest first."""
        notes = self.journal.notes.get(_VOCABULARIES, [])
        return [SmallerVocabulary(unpack_rows(kept), lost) for kept, lost in notes]

    @cached_property
    def _pricing(self) -> Iterator[SmallerVocabulary]:
        """The others that are in question."""
        return price_vocabularies(self.model, self.options, SHARES[len(self._priced) :])

    def _vocabularies(self) -> Iterator[SmallerVocabulary]:
        """Yield smaller vocabularies, the largest first. What one costs is measured when it is asked for first."""
        yield from self._priced
        for each in self._pricing:
            known = self.journal.notes.get(_VOCABULARIES, [])
            self.journal.record(_VOCABULARIES, note=[*known, [pack_rows(each.kept), each.lost]])
            yield each

    def _plan(self, kept: Sequence[int]) -> FilePlanner:
        """Return the planner of files with some of the tokens."""
        if len(kept) not in self._narrow:
            self._narrow[len(kept)] = plan_with_rows(self.model, kept, self.folder / "tokenizers" / str(len(kept)))
        return self._narrow[len(kept)]

    def kept_rows(self, rows: int | None) -> Sequence[int] | None:
        """Return the tokens of a choice that has so many; None if all stay."""
        return next((each.kept for each in self._priced if len(each.kept) == rows), None)

    def at_bytes(self, limit: int) -> TypeChoice:
        """Return what loses least: types, and columns or tokens that go if types lose much; BudgetError if none fit."""

        def fit(budget: TypeBudget) -> TypeChoice:
            choice = budget.at_bytes(limit)
            is_full = choice.columns and choice.bytes > limit - HEAD
            return budget.at_bytes(limit - HEAD) if is_full else choice

        return self._least(fit)

    def at_time(self, limit: float, timed: Timed) -> TypeChoice:
        """Return as `at_bytes` what loses least of files that take at most `limit` nanoseconds of some work."""
        times = self.times(timed)
        return self._least(lambda budget: budget.at_time(limit, times))

    def at_loss(self, limit: float) -> TypeChoice:
        """Return the smallest file that is predicted to lose at most `limit` nats, by types, columns and tokens.

        BudgetError if none does.
        """
        self.fitted.at_loss(limit)  # what no types keep to, no types of fewer columns do
        return self._least(lambda budget: budget.at_loss(limit), by=lambda choice: choice.bytes, may_lose=limit)

    def times(self, timed: Timed) -> FileTimes:
        """Return the times of weights of every type in question."""
        notes = self.journal.notes
        if _TIMES not in notes:
            widths = column_widths(self.model)
            columns = widths[0] if len(widths) > 1 else 0
            dense, _ = _without_losses(self.planner)
            kinds = sorted(set().union(*dense.losses.values(), *map(types_for, widths)))
            measured = time_types(self.planner, kinds, timed, self.folder, columns)
            self.journal.record(_TIMES, note=measured.note())
        return FileTimes.read(notes[_TIMES])

    def least_time(self, timed: Timed) -> float:
        """Return the nanoseconds of the fastest types, with the fewest columns and tokens that are tried."""
        times = self.times(timed)
        budget, fewest = _without_losses(self.planner)
        try:
            least = budget.at_time(0, times).time or 0.0
        except BudgetError as error:
            least = error.least
        return least - sum(
            (1 - fewest) * min(budget.time_of(name, kind, times) for kind in times.by_kind)
            for name in OUTER
            if name in budget.losses and fewest < 1
        )

    def _least(
        self,
        solve: Callable[[TypeBudget], TypeChoice],
        by: Callable[[TypeChoice], float] = lambda choice: choice.kl,
        may_lose: float = 0.0,
    ) -> TypeChoice:
        """Return what is best by any budget, the least of `by`; the BudgetError of the last one if none is kept to.

        Fewer tokens and columns are in question where types alone lose much, or `may_lose` allows much.
        """
        found: list[TypeChoice] = []
        failed: list[BudgetError] = []

        def lost() -> float:
            return max(may_lose, min((choice.kl for choice in found), default=math.inf))

        def best() -> float:
            return min(map(by, found), default=math.inf)

        def add(budget: TypeBudget) -> None:
            try:
                found.append(solve(budget))
            except BudgetError as error:
                failed.append(error)

        def add_with_fewer_tokens(budget: TypeBudget) -> None:
            for each in self._vocabularies():
                before = best()
                # Rounding the rows that stay is taken to lose as much.
                add(replace(budget, planner=self._plan(each.kept), rows=len(each.kept), by_rows=each.lost))
                if math.isfinite(before) and best() >= before:  # each further token costs more, and saves as much
                    return

        add(self.fitted)
        if lost() > CUT_FROM:
            add_with_fewer_tokens(self.fitted)
        if lost() > PRUNE_FROM and len(column_widths(self.model)) > 1:
            add(self.joint)
            add_with_fewer_tokens(self.joint)
        if not found:
            raise failed[-1]
        return min(found, key=by)


def _without_losses(planner: FilePlanner) -> tuple[TypeBudget, Fraction]:
    """Return a budget of all types, in which MLPs may keep a third of their columns, and the least share of tokens."""
    model = planner.model
    losses = {
        name: dict.fromkeys(types_for(weight.shape[-1]), 0.0)
        for name, weight in lay_out(model).tensors.items()
        if len(weight.shape) == 2 and types_for(weight.shape[-1])
    }
    columns = {block: {1: 0.0, MOST_COLUMNS: 0.0} for block in model.blocks_with(SPACE)}
    share = Fraction(SHARES[-1], 100) if is_embedding_large(model) else Fraction(1)
    return TypeBudget(planner, losses, columns), share


def export_of(chosen: GgufType, others: OtherTypes) -> dict[str, Any]:
    """Return the key `export` of a recipe that writes a file of these types, by error feedback."""
    asked = {"embedding_type": others.embedding, "output_type": others.output, "types": dict(others.matrices)}
    types = {key: each for key, each in asked.items() if each}
    return {"format": "gguf", "dtype": chosen, **types, "rounding": "gptq"}


def check_choosable(planner: FilePlanner) -> None:
    """Refuse a model with experts: what types lose is not measured of them."""
    layout = lay_out(planner.model)
    stacked = next((name for name, weight in layout.tensors.items() if len(weight.shape) > 2), None)
    if stacked is not None:
        raise UserError(
            f"{planner.model.checkpoint.name} has experts ({stacked}), and types are chosen by budget of models "
            "without them: `ckpt-prune export --format gguf --dtype q4_k_m` writes a file of it"
        )


def check_reach(limit: int, planner: FilePlanner, flag: str = "--target-bytes") -> None:
    """Refuse a size below that of the coarsest types with the fewest columns and tokens that are tried."""
    pruned, rows = _without_losses(planner)
    budget, least = replace(pruned, columns={}), pruned.least
    fewest = least
    if rows < 1:
        for share, sign in ((Fraction(1), -1), (rows, 1)):
            sizes = [{budget.size(name, kind, share) for kind in budget.losses.get(name, ())} for name in OUTER]
            fewest += sign * sum(min(each) for each in sizes if each)
    if limit < fewest:
        tokens = "" if fewest == least else f", with {SHARES[-1]} % of its tokens {fewest / 1e6:.1f} MB"
        raise UserError(
            f"{flag}: {limit / 1e6:.4g} MB are out of reach: the coarsest types make a file of "
            f"{budget.least / 1e6:.1f} MB of {planner.model.checkpoint.name}, and with a third of its MLP columns "
            f"{least / 1e6:.1f} MB{tokens}; ask for more"
        )
