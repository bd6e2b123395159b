"""Measures for budgets what a mixture loses if all its experts keep fewer columns: it is pruned so, and run.

Nothing is predicted from gradients here: they are of all tokens of the samples, and an expert sees some of them.
"""

import shutil
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import torch

from ckpt_prune.budget.columns import ColumnLosses
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.gguf.score import TextPredictions, read_reference
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import expert_space
from ckpt_prune.runner.column_budgets import multiple_of, recipe_of
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.effects.column_losses import SPACE

SHARES = (Fraction(1, 2), Fraction(3, 4))
"""Shares of each expert's columns that are tried: all experts keep the same share."""
_COLUMNS = "losses of columns of experts"
"""Entry of the journal."""


@dataclass(frozen=True)
class ExpertColumns:
    """The columns that all experts of a model may keep, and what that loses, measured when it is asked for.

    Attributes:
        samples: that columns are chosen and refitted on.
        held_out: that the pruned model is run on.
        seed: of their choice.
        folder: for the pruned model.
        journal: of what is done.
        device, compute_dtype: that blocks run in.
    """

    model: Model
    samples: Samples
    held_out: Samples
    seed: int
    folder: Path
    journal: Journal
    device: torch.device
    compute_dtype: torch.dtype
    score: str = "obs"

    @property
    def losses(self) -> ColumnLosses:
        """Block → columns of its experts → its share of what all of them lose; empty if none may go."""
        model, notes = self.model, self.journal.notes
        widths = expert_widths(model)
        if not widths:
            return {}
        if _COLUMNS not in notes:
            self.journal.record(_COLUMNS, note={str(width): self._lost(width) for width in widths[:-1]})
        lost = {int(width): value / model.blocks for width, value in notes[_COLUMNS].items()}
        return {block: lost | {widths[-1]: 0.0} for block in range(model.blocks)}

    def _lost(self, width: int) -> float:
        """Return the divergence of the model whose experts keep so many columns, in nats a token."""
        recipe = FullRecipe.model_validate(recipe_of([width] * self.model.blocks, None, self.score, None))
        folds = min(recipe.folds, len(self.samples))
        live = LiveSamples(self.samples, folds, self.compute_dtype, seed=self.seed)
        out = self.folder / f"columns-{width}"
        run_job(Job(self.model, recipe, live=live, device=self.device), out, overwrite=True)
        lost = self._reference.diverge(out)
        shutil.rmtree(out)
        return max(0.0, lost)

    @cached_property
    def _reference(self) -> TextPredictions:
        windows = self.held_out.batch(slice(0, len(self.held_out)))["input_ids"]
        return read_reference(self.model.checkpoint.whole, windows)


def expert_widths(model: Model) -> list[int]:
    """Return the columns that all experts may keep, all of them at last; none unless every block has experts alike."""
    counts = model.unit_counts(expert_space(SPACE, 0))
    if len(counts) < model.blocks or len(set(counts)) != 1:
        return []
    units = counts[0]
    multiple = multiple_of(units)
    widths = {int(share * units) // multiple * multiple for share in SHARES} - {0}
    return [*sorted(widths), units] if widths else []
