"""Chooses the columns and tokens to drop before a graph is made, in one budget with the bits of its weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

from ckpt_prune.budget.choices import BudgetError, solve_each
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.model.model import Model
from ckpt_prune.onnx.quantization.choosing import ColumnChoice
from ckpt_prune.onnx.quantization.deciding import Decider, Narrow, Scale
from ckpt_prune.options.commands import FrontierOptions
from ckpt_prune.runner.column_budgets import ColumnBudgets, column_widths, recipe_of
from ckpt_prune.runner.vocabularies import SmallerVocabulary, Vocabularies, least_share, tables_in_question
from ckpt_prune.stages.spaces.effects.column_losses import SPACE
from ckpt_prune.stages.vocabulary.records import pack_rows, unpack_rows
from ckpt_prune.stages.vocabulary.smaller_checkpoint import vocabulary_rows


@dataclass(frozen=True)
class Pruning:
    """A choice of columns and tokens to drop, with the predicted loss and size.

    Attributes:
        columns: that the MLP of each block keeps; empty: all.
        kept: tokens that stay, ascending rows of the embedding; None: all.
        predicted: what the outputs lose once weights are in few bits.
        by_pruning: part of it that fewer columns and tokens add.
        cost: bytes of the graph.
        score: by which columns go.
    """

    columns: tuple[int, ...]
    kept: tuple[int, ...] | None
    predicted: float
    by_pruning: float
    cost: float
    score: str

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe that prunes so."""
        return recipe_of(self.columns, self.kept, self.score, None)

    def note(self) -> dict[str, Any]:
        """Return what a journal keeps of it."""
        return asdict(self) | {"kept": None if self.kept is None else pack_rows(self.kept)}

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> "Pruning":
        """Read a note of a journal."""
        kept = None if note["kept"] is None else tuple(unpack_rows(note["kept"]))
        return cls(**dict(note) | {"columns": tuple(note["columns"]), "kept": kept})


@dataclass(frozen=True, eq=False)
class GraphPruning:
    """The columns and tokens that may go of a model whose graph is made.

    Attributes:
        columns: that MLPs may keep, and what that loses.
        options: of the command; they name the text that tokens are priced on.
        decider: knows all ways to store weights of the graph.
        staging: with the journal.
        generates: the graph predicts tokens, so that what fewer of them cost can be told.
    """

    columns: ColumnBudgets
    options: FrontierOptions
    decider: Decider
    staging: Staging
    generates: bool

    @property
    def model(self) -> Model:
        return self.columns.model

    @cached_property
    def vocabularies(self) -> Vocabularies:
        return Vocabularies(self.model, self.options, self.staging.journal)

    def _find(self, weights: list[str]) -> list[str]:
        """Return the names in the graph of some weights; none if one is not there as it is in the checkpoint."""
        read = self.model.checkpoint.read(weights)
        found = self.decider.find_matrices({name: read[name].float().numpy() for name in weights})
        return [found[name] for name in weights] if len(found) == len(weights) else []

    @cached_property
    def mlps(self) -> dict[int, list[str]]:
        """Block → names in the graph of the weights of its MLP; none if fewer columns are not in question."""
        model = self.model
        if len(column_widths(model)) < 2:
            return {}
        names = {b: [model.tensor(b, each) for each in model.spaces(b)[SPACE].modules] for b in range(model.blocks)}
        in_graph = {block: self._find(weights) for block, weights in names.items()}
        return in_graph if all(in_graph.values()) else {}  # some are fused in the checkpoint, and apart in the graph

    @cached_property
    def tables(self) -> list[str]:
        """Names in the graph of the weights with a row for each token; none if fewer tokens are not in question."""
        model = self.model
        tables = tables_in_question(model, self.options) if self.generates else ()
        return list(dict.fromkeys(self._find(sorted(tables)))) if tables else []

    def check_reach(self, limit: int) -> None:
        """Refuse a size below that of 4 bits for each weight and the fewest columns and tokens."""
        narrow: dict[str, Narrow] = {}
        if self.mlps:
            widths = column_widths(self.model)
            share = Fraction(widths[0], widths[-1]), widths[-1]
            narrow |= {name: share for weights in self.mlps.values() for name in weights}
        narrow |= dict.fromkeys(self.tables, (least_share(self.model, self.options), vocabulary_rows(self.model)))
        self.decider.check_bytes(limit, narrow)

    def choose(self, fitted: Decider, limit: int | None, loss: float, name: str) -> Pruning:
        """Choose what loses least in so many bytes, or takes fewest of what loses at most `loss`, by GPTQ.

        Raises:
            BudgetError: nothing fits.
        """
        journal = self.staging.journal
        if name not in journal.notes:
            journal.record(name, note=self._choose(fitted, limit, loss).note())
        return Pruning.read(journal.notes[name])

    def _choose(self, fitted: Decider, limit: int | None, loss: float) -> Pruning:
        failed: list[BudgetError] = []
        solve = partial(self._solve, fitted, fitted.scale(limit, loss), limit, loss)

        def solved(vocabulary: SmallerVocabulary | None) -> list[Pruning]:
            return solve_each(solve, [vocabulary], failed)

        def by(pruning: Pruning) -> float:
            return pruning.cost if limit is None else pruning.predicted

        found = solved(None)
        if self.tables:
            self.vocabularies.add_choices(found, solved, by)
        if not found:
            raise failed[-1]
        return min(found, key=by)

    def _solve(
        self, fitted: Decider, scale: Scale, limit: int | None, loss: float, vocabulary: SmallerVocabulary | None
    ) -> Pruning:
        losses = self.columns.losses if self.mlps else {}
        if vocabulary is None:
            choice: ColumnChoice = fitted.with_columns(scale, limit, loss, self.mlps, losses)
            kept, lost = None, 0.0
        else:
            kept, lost, rows = tuple(vocabulary.kept), vocabulary.lost, vocabulary_rows(self.model)
            tables = dict.fromkeys(self.tables, (Fraction(len(kept), rows), rows))
            choice = fitted.with_columns(scale, limit, loss - lost, self.mlps, losses, tables)
        score = self.columns.score if choice.columns else "obs"
        return Pruning(choice.columns, kept, choice.predicted + lost, choice.by_pruning + lost, choice.cost, score)
