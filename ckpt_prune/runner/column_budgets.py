"""Predicts for budgets what a model loses by fewer columns in its MLPs, and writes the recipe that drops them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.budget.columns import ColumnLosses
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.model.model import Model
from ckpt_prune.stages.spaces.effects.column_losses import SPACE, PredictedColumns, predict_columns
from ckpt_prune.stages.spaces.effects.gradients import add_gradients
from ckpt_prune.stages.vocabulary.records import pack_rows

MOST_COLUMNS = 3
"""An MLP keeps more than one part of so many of its columns."""
BY_BUDGET = "frontier"
"""Name of the recipes of this module."""
FOLDS = 4
"""Folds of the samples. Fewer columns are predicted with the last one held out."""
_COLUMNS = "losses of columns"
"""Entry of the journal."""


@dataclass(frozen=True)
class ColumnBudgets:
    """The columns that the MLPs of a model may keep, and what that is predicted to lose, measured when it is asked for.

    Attributes:
        samples: that the model is measured on.
        seed: of their choice.
        folder: for statistics.
        journal: of what is done.
        device, compute_dtype: that blocks run in.
        measured: statistics of the samples that have Grams; None: they are measured when columns are asked for.
    """

    model: Model
    samples: Samples
    seed: int
    folder: Path
    journal: Journal
    device: torch.device
    compute_dtype: torch.dtype
    measured: Path | None = None

    @property
    def score(self) -> str:
        """The score by which columns go."""
        return self._predicted.score

    @property
    def losses(self) -> ColumnLosses:
        """Block → each of `column_widths` → predicted loss, as in `PredictedColumns`; empty if none may go."""
        widths = column_widths(self.model)
        if len(widths) < 2:
            return {}
        losses = self._predicted.losses
        return {block: {width: by_width[width] for width in widths} for block, by_width in losses.items()}

    @cached_property
    def _predicted(self) -> PredictedColumns:
        notes, model, samples = self.journal.notes, self.model, self.samples
        place = self.measured or self.folder / "grams"
        how: dict[str, Any] = {"device": self.device, "compute_dtype": self.compute_dtype}
        if _COLUMNS not in notes:
            if not place.is_dir():
                of: dict[str, Any] = {"seed": self.seed, "folds": min(FOLDS, len(samples))}
                measure_statistics(model, samples, place, collect=("moments", "gram"), **of, **how)
            statistics = add_gradients(model, Statistics(place), samples, spaces=[SPACE], distances=False, **how)
            multiple = multiple_of(column_widths(model)[-1])
            predicted = predict_columns(model, statistics, multiple, self.device)
            self.journal.record(_COLUMNS, note=asdict(predicted))
        note = notes[_COLUMNS]
        losses = note["losses"].items()
        by_block = {int(block): {int(kept): lost for kept, lost in by_width.items()} for block, by_width in losses}
        return PredictedColumns(note["score"], by_block)


def column_widths(model: Model) -> list[int]:
    """Return the columns that an MLP may keep, all of them at last: multiples that leave finer types their rows.

    There are none where MLPs differ.
    """
    counts = set(model.unit_counts(SPACE))
    if len(counts) != 1 or len(model.blocks_with(SPACE)) < model.blocks:
        return []
    units = counts.pop()
    multiple = multiple_of(units)
    return [*range(-(-(units // MOST_COLUMNS + 1) // multiple) * multiple, units, multiple), units]


def recipe_of(
    columns: Sequence[int], kept: Sequence[int] | None, score: str, export: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the recipe that keeps some tokens, and columns of each block's MLP if any go, and ends in a file.

    If nothing goes, it says that all columns stay: a recipe prunes something.
    """
    recipe: dict[str, Any] = {"version": 1, "name": BY_BUDGET}
    if kept is not None:
        recipe |= {"vocabulary": {"kept": pack_rows(kept)}}
    if columns or kept is None:
        stay = {"keep": list(columns)} if columns else {"ratio": 0.0}
        recipe |= {
            "target": "drift",
            "widths": "uniform" if len(set(columns)) <= 1 else "per_layer",
            "container": "any",
            "spaces": {SPACE: {"score": score, **stay, "compensation": {"method": "auto"}}},
        }
    return recipe if export is None else recipe | {"export": dict(export)}


def multiple_of(units: int) -> int:
    """Return what columns that stay are multiples of, so that finer types have their rows."""
    return 256 if units % 256 == 0 and units >= 1024 else 32
