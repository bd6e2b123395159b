"""The bytes and the predicted loss of every type of a matrix and every width of an MLP in a GGUF file.

`frontier` makes the file that these figures favour and measures it; `prune --target-bytes … --for llama.cpp` makes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf import PoolingType

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.checkpoint.side_files import side_files_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import decimal_bytes
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.gguf.architectures import takes_different_blocks
from ckpt_prune.gguf.choosing import TypeBudget, TypeChoice
from ckpt_prune.gguf.contents import POOLING_KEY
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.fitting import has_room
from ckpt_prune.gguf.importance import importance_of_statistics
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.losses import TypeLosses, predict_type_losses, types_for
from ckpt_prune.gguf.timing import FileTimes, time_types
from ckpt_prune.gguf.types import OUTER, is_matrix
from ckpt_prune.measure.samples.samples import SampleRange
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.recipe.sizes import Timed
from ckpt_prune.runner.column_budgets import MOST_COLUMNS, column_widths
from ckpt_prune.runner.expert_columns import ExpertColumns, expert_widths
from ckpt_prune.runner.pruning_budgets import Columns, PruningBudgets
from ckpt_prune.runner.vocabularies import SHARES, SmallerVocabulary, least_share
from ckpt_prune.stages.spaces.effects.column_losses import SPACE
from ckpt_prune.stages.vocabulary.files import read_pieces
from ckpt_prune.stages.vocabulary.smaller_checkpoint import keep_rows

HEAD = 4096
"""Bytes that the head of a file may grow by where blocks differ in width."""
_LOSSES = "losses of types"
_TIMES = "times of types"
"""Entries of the journal."""


def as_in_file(model: Model) -> Model:
    """Return a model as its file has it: one that makes embeddings there does without a head that predicts masks.

    Raises:
        UserError: llama.cpp computes no such model, or nothing tells there what its types lose.
    """
    layout = lay_out(model)
    reason = None
    if layout.architecture.stacked:
        reason = f"is written as {layout.architecture.name}, whose matrices are rounded to nearest"
    elif layout.values.get(POOLING_KEY) == PoolingType.RANK:
        reason = "scores pairs of texts, and types are chosen by what predictions or embeddings lose"
    if reason is not None:
        raise UserError(
            f"{model.checkpoint.name} {reason}: no size is chosen for llama.cpp; choose a type (`export --format gguf "
            "--dtype q8_0`)"
        )
    if not (layout.embeds and model.family.gives_logits):
        return model
    return replace(model, family=model.family.model_copy(update={"used_for": "sentence-similarity"}))


@dataclass(frozen=True)
class FileBudgets(PruningBudgets[TypeBudget]):
    """The budgets of a model's file.

    Attributes:
        planner: of the model's files.
    """

    planner: FilePlanner = field(kw_only=True)
    _narrow: dict[int, FilePlanner] = field(default_factory=dict, init=False, repr=False)

    def _is_fed(self, module: str) -> bool:
        return has_room(self.model, module, self.folds)

    @cached_property
    def columns(self) -> Columns:
        """The columns that MLPs may keep, or all experts, and what is lost by them."""
        if not (expert_widths(self.model) and self.model.family.gives_logits):
            return super().columns
        rest = len(self.few) if self.folds > 1 else 0
        fitted, seed = SampleRange(self.samples, rest, len(self.samples)), self.options.seed
        return ExpertColumns(self.model, fitted, self.few, seed, self.folder, self.journal, **self.how)

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
        return TypeBudget(self.planner, self._losses.weighed, fitted=True, rerouting=self._losses.rerouting)

    @cached_property
    def fitted(self) -> TypeBudget:
        """The budget of types that are rounded by error feedback."""
        return replace(self.types, losses=self._losses.fitted)

    @cached_property
    def joint(self) -> list[TypeBudget]:
        """The budget of types and columns together; none where MLPs differ or have few columns.

        All experts keep as many in every block.
        """
        losses = self.columns.losses
        return [replace(self.fitted, columns=losses, alike=self._are_alike)] if losses else []

    def with_rows(self, budget: TypeBudget, vocabulary: SmallerVocabulary) -> TypeBudget:
        kept = vocabulary.kept
        return replace(budget, planner=self._plan(kept), rows=len(kept), by_rows=vocabulary.lost)

    @property
    def _are_alike(self) -> bool:
        """Whether the MLPs of all blocks keep as many columns."""
        layout = lay_out(self.model)
        tied, model_type = "output.weight" not in layout.tensors, str(self.model.checkpoint.config["model_type"])
        return bool(expert_widths(self.model) or layout.architecture.wholes) or not takes_different_blocks(
            model_type, tied=tied
        )

    def _plan(self, kept: Sequence[int]) -> FilePlanner:
        """Return the planner of files with some of the tokens."""
        if len(kept) not in self._narrow:
            self._narrow[len(kept)] = _plan_with_rows(self.model, kept, self.folder / "tokenizers" / str(len(kept)))
        return self._narrow[len(kept)]

    def at_bytes(self, limit: int) -> TypeChoice:
        """Return what loses least: types, and columns or tokens that go if types lose much; BudgetError if none fit."""

        def fit(budget: TypeBudget) -> TypeChoice:
            choice = budget.at_bytes(limit)
            is_full = choice.columns and choice.bytes > limit - HEAD
            return budget.at_bytes(limit - HEAD) if is_full else choice

        return self.least(fit)

    def at_time(self, limit: float, timed: Timed) -> TypeChoice:
        """Return as `at_bytes` what loses least of files that take at most `limit` nanoseconds of some work."""
        times = self.times(timed)
        return self.least(lambda budget: budget.at_time(limit, times))

    def at_loss(self, limit: float) -> TypeChoice:
        """Return the smallest file that is predicted to lose at most `limit` nats, by types, columns and tokens.

        BudgetError if none does.
        """
        self.fitted.at_loss(limit)  # what no types keep to, no types of fewer columns do
        return self.least(lambda budget: budget.at_loss(limit), by=lambda choice: choice.bytes, may_lose=limit)

    def times(self, timed: Timed) -> FileTimes:
        """Return the times of weights of every type in question."""
        notes = self.journal.notes
        if _TIMES not in notes:
            widths = column_widths(self.model)
            columns = widths[0] if len(widths) > 1 else 0
            dense, _ = _without_losses(self.planner, self.options)
            kinds = sorted(set().union(*dense.losses.values(), *map(types_for, widths or expert_widths(self.model))))
            measured = time_types(self.planner, kinds, timed, self.folder, columns)
            self.journal.record(_TIMES, note=measured.note())
        return FileTimes.read(notes[_TIMES])

    def least_time(self, timed: Timed) -> float:
        """Return the nanoseconds of the fastest types, with the fewest columns and tokens that are tried."""
        times = self.times(timed)
        budget, fewest = _without_losses(self.planner, self.options)
        try:
            least = budget.at_time(0, times).time or 0.0
        except BudgetError as error:
            least = error.least
        return least - sum(
            (1 - fewest) * min(budget.time_of(name, kind, times) for kind in times.by_kind)
            for name in OUTER
            if name in budget.losses and fewest < 1
        )


def _without_losses(planner: FilePlanner, options: SampleOptions) -> tuple[TypeBudget, Fraction]:
    """Return a budget of all types in which MLPs may keep the fewest columns that are tried, and the least tokens."""
    model = planner.model
    losses = {
        name: dict.fromkeys(types_for(weight.shape[-1]), 0.0)
        for name, weight in lay_out(model, "q8_0").tensors.items()
        if is_matrix(name, weight) and types_for(weight.shape[-1])
    }
    widths, blocks = expert_widths(model), model.blocks_with(SPACE)
    fewest, most = (widths[0], widths[-1]) if widths else (1, MOST_COLUMNS)
    columns = {block: {fewest: 0.0, most: 0.0} for block in (range(model.blocks) if widths else blocks)}
    return TypeBudget(planner, losses, columns), least_share(model, options)


def _plan_with_rows(model: Model, kept: Sequence[int], folder: Path) -> FilePlanner:
    """Return the planner of the files of a model with some of its tokens, whose tokenizer is written into a folder."""
    side = side_files_of(model.checkpoint).files
    smaller = keep_rows(model, read_pieces(model.checkpoint.path, side), kept)
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: path.read_bytes() for name, path in side.items()} | dict(smaller.checkpoint.rewritten)
    files["config.json"] = pretty_json(smaller.checkpoint.config).encode()
    for name, content in files.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return FilePlanner(smaller, folder)


def export_of(chosen: GgufType, others: OtherTypes) -> dict[str, Any]:
    """Return the key `export` of a recipe that writes a file of these types, by error feedback."""
    asked = {"embedding_type": others.embedding, "output_type": others.output, "types": dict(others.matrices)}
    types = {key: each for key, each in asked.items() if each}
    return {"format": "gguf", "dtype": chosen, **types, "rounding": "gptq"}


def check_reach(limit: int, planner: FilePlanner, options: SampleOptions, kept_back: int = 0) -> None:
    """Refuse a size below that of the coarsest types with the fewest columns and tokens that are tried.

    Args:
        kept_back: bytes of it that stay free, besides `HEAD` where columns go.
    """
    pruned, rows = _without_losses(planner, options)
    budget, least = replace(pruned, columns={}), pruned.least + kept_back + (HEAD if pruned.columns else 0)
    fewest = least
    if rows < 1:
        for share, sign in ((Fraction(1), -1), (rows, 1)):
            sizes = [{budget.size(name, kind, share) for kind in budget.losses.get(name, ())} for name in OUTER]
            fewest += sign * sum(min(each) for each in sizes if each)
    if limit < fewest:
        fewer = f", and with the fewest columns that are tried {decimal_bytes(least)}" if pruned.columns else ""
        fewer += "" if fewest == least else f", with {SHARES[-1]} % of its tokens {decimal_bytes(fewest)}"
        raise UserError(
            f"--target-bytes: {decimal_bytes(limit)} are out of reach: the coarsest types make a file of "
            f"{decimal_bytes(budget.least + kept_back)} of {planner.model.checkpoint.name}{fewer}; ask for more"
        )
