"""The bytes and the predicted loss of every way to store each weight of a checkpoint for vLLM, and of every width.

`frontier --for vllm` makes the checkpoint that these figures favour and measures it. `quantize --target-bytes` makes
one of all columns and tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.scratch import hidden_folder
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import decimal_bytes
from ckpt_prune.common.progress import Notices
from ckpt_prune.job.layout import Layout, layout_of
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import FrontierOptions, QuantizeOptions
from ckpt_prune.recipe.sizes import parse_size
from ckpt_prune.runner.column_budgets import column_widths
from ckpt_prune.runner.column_budgets import recipe_of as columns_recipe
from ckpt_prune.runner.pruning_budgets import PruningBudgets
from ckpt_prune.runner.runtimes import fit_to_runtimes
from ckpt_prune.runner.vocabularies import SmallerVocabulary, least_share, tables_in_question
from ckpt_prune.stages.quantize.choosing import (
    SchemeBudget,
    SchemeChoice,
    Shape,
    linear_weights,
    predict_scheme_losses,
    schemes_for,
)
from ckpt_prune.stages.quantize.keys import QuantizeRecipe, quantize_recipe
from ckpt_prune.stages.quantize.output import check_model
from ckpt_prune.stages.spaces.effects.column_losses import SPACE
from ckpt_prune.stages.vocabulary.smaller_checkpoint import keep_rows

COLUMNS = 64
"""Columns that an MLP keeps are a multiple of so many, which kernels of runtimes want, and most groups of columns."""
_LOSSES = "losses of ways to store weights"
"""Entry of the journal."""


@dataclass(frozen=True)
class SchemeBudgets(PruningBudgets[SchemeBudget]):
    """The budget of a checkpoint, once what each way to store each weight loses is predicted.

    All MLPs keep as many columns, since runtimes of quantised weights run no code of our own.
    """

    @cached_property
    def fitted(self) -> SchemeBudget:
        notes = self.journal.notes
        if _LOSSES not in notes:
            moments = dict(pair for block in range(self.model.blocks) for pair in self.moments(block).items())
            self.journal.record(_LOSSES, note=predict_scheme_losses(self.model, self.few, moments, **self.how))
        return SchemeBudget(self.model, notes[_LOSSES])

    @cached_property
    def joint(self) -> list[SchemeBudget]:
        losses = self.columns.losses
        *fewer, _ = column_widths(self.model) or [0]
        return [
            replace(self.fitted, shape=self._shape(width, None, sum(by_width[width] for by_width in losses.values())))
            for width in fewer
            if width % COLUMNS == 0
        ]

    def with_rows(self, budget: SchemeBudget, vocabulary: SmallerVocabulary) -> SchemeBudget:
        columns, lost = (None, 0.0) if budget.shape is None else (budget.shape.columns, budget.shape.lost)
        return replace(budget, shape=self._shape(columns, vocabulary.kept, lost + vocabulary.lost))

    def _shape(self, columns: int | None, kept: Sequence[int] | None, lost: float) -> Shape:
        model = self.model if kept is None else keep_rows(self.model, None, kept)
        return Shape(pruned_layout(model, columns), columns, None if kept is None else len(kept), lost)

    def at_bytes(self, limit: int) -> SchemeChoice:
        """Return what loses least: forms of weights, and columns or tokens that go if forms alone lose much.

        BudgetError if nothing fits.
        """
        return self.least(lambda budget: budget.at_bytes(limit))

    def at_loss(self, limit: float) -> SchemeChoice:
        """Return the smallest checkpoint that is predicted to lose at most `limit` nats; BudgetError if none does."""
        return self.least(lambda budget: budget.at_loss(limit), by=lambda choice: choice.bytes, may_lose=limit)

    def recipe(self, choice: SchemeChoice) -> dict[str, Any]:
        """Return the recipe of `prune` that makes a choice with fewer columns or tokens."""
        shape = choice.shape
        assert shape is not None
        columns = [] if shape.columns is None else [shape.columns] * self.model.blocks
        score = self.columns.score if columns else "obs"
        recipe = columns_recipe(columns, self.vocabularies.kept_rows(shape.rows), score, None) | {"runs_on": ["vllm"]}
        if not choice.rounds:
            return recipe
        keys = recipe_of(self.model, choice).quantize.model_dump(exclude_none=True, exclude_defaults=True)
        # Types name every weight. With a size of groups of its own, columns would have to be multiples of that.
        return recipe | {"quantize": {key: keys[key] for key in keys if key != "group_size" or "types" not in keys}}


def pruned_layout(model: Model, columns: int | None) -> Layout:
    """Return the files of a model whose MLPs keep some of their columns, with their tensors."""
    layout = layout_of(model)
    if columns is None:
        return layout
    shapes = model.shapes_at([own | {SPACE: columns} for own in model.dense_widths])
    return {file: {name: shapes[name] for name in tensors} for file, tensors in layout.items()}


def recipe_of(model: Model, choice: SchemeChoice) -> QuantizeRecipe:
    """Return the recipe that stores weights by a choice, rounded by GPTQ."""
    usual = choice.usual
    types = choice.types(model) if set(choice.counts) != {usual.name} else {}
    return quantize_recipe(usual.format, usual.name.partition(":")[2], "gptq", types)


def check_storable(model: Model) -> None:
    """Refuse a model whose weights are not rounded, or that vLLM does not run."""
    check_model(model)
    fit_to_runtimes(quantize_recipe("int8", None, "gptq").model_copy(update={"runs_on": ["vllm"]}), model, Notices())


def _without_losses(model: Model) -> SchemeBudget:
    specs = linear_weights(model)
    losses = {name: dict.fromkeys((way.name for way in schemes_for(spec[1][1])), 0.0) for name, spec in specs.items()}
    return SchemeBudget(model, losses)


def needs_pruning(limit: int | None, model: Model) -> bool:
    """Return whether 4 bits for all linear weights take more than so many bytes."""
    return limit is not None and limit < _without_losses(model).least


def check_reach(limit: int, model: Model, pruned: FrontierOptions | None = None) -> None:
    """Refuse a size below that of 4 bits for all linear weights, with the fewest columns and tokens if `pruned` so."""
    budget = _without_losses(model)
    least = budget.least
    if pruned is not None:
        columns = next((width for width in column_widths(model) if width % COLUMNS == 0), None)
        least = replace(budget, shape=Shape(pruned_layout(model, columns))).least
        tables = sum(model.checkpoint.tensors[name].nbytes for name in tables_in_question(model, pruned))
        least -= round((1 - least_share(model, pruned)) * tables)
    if limit < least:
        outside = sum(info.nbytes for name, info in model.checkpoint.tensors.items() if name not in budget.losses)
        fewest = f", with the fewest columns and tokens that are tried {decimal_bytes(least)}" if pruned else ""
        raise UserError(
            f"--target-bytes: {decimal_bytes(limit)} are out of reach: with 4 bits for all linear weights "
            f"{model.checkpoint.name} takes {decimal_bytes(budget.least)}, {decimal_bytes(outside)} of them for the "
            f"embedding and what else stays as it is{fewest}; ask for more{'' if pruned else ', or prune it first'}"
        )


def choose_for_bytes(options: QuantizeOptions, model: Model, samples: Samples, say: Notices) -> QuantizeRecipe:
    """Measure a model and return the recipe of `quantize` for a size."""
    limit = parse_size("bytes", str(options.target_bytes)).of(cost_of(model).bytes)
    check_reach(limit, model)
    with hidden_folder(options.output.absolute().parent, options.output.name) as folder:
        budgets = SchemeBudgets(model, samples, options, folder, Journal(folder, "schemes"))
        try:
            choice = budgets.fitted.at_bytes(limit)
        except BudgetError as error:
            raise UserError(f"--target-bytes: nothing has {decimal_bytes(limit)}: ask for more") from error
    ways = ", ".join(f"{count} in {way}" for way, count in choice.counts.items())
    say(f"chosen for {decimal_bytes(choice.bytes)}: {ways}; predicted divergence (KL) {choice.kl:.3f}")
    return recipe_of(model, choice)
