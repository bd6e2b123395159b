"""Variants of the dense model with one site pruned, at several widths: effects are measured or predicted for them."""

import itertools
import math
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.decisions import Decisions, SiteDecision
from ckpt_prune.measure.moment_sources import CachedMoments, KnownMoments
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName
from ckpt_prune.parallel.group import ALONE, working_in
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.pruner import Pruner
from ckpt_prune.stages.spaces.solvers import SOLVERS, solver_of

POINTS = (0.25, 0.5, 0.75)
"""Shares of a site's units that are dropped while the others are whole."""


def dropped_counts(units: int, points: tuple[float, ...]) -> list[int]:
    """Return units to drop at these shares: distinct, ascending, from 1 to all but one; none of a single unit."""
    return sorted({min(units - 1, max(1, round(units * point))) for point in points}) if units > 1 else []


_NEEDS = {
    "gram": ("effects need Grams", ""),
    "logits": ("effects of q and k need their moments", ",logits"),
    "rotary": ("effects of rotary pairs need their moments", ",rotary"),
}


def counts_of(
    model: Model, statistics: Statistics, spaces: Collection[SpaceName], points: tuple[float, ...]
) -> dict[SpaceName, list[int]]:
    """Return units to drop of a site of every space, in the family's order; check what statistics hold for it."""
    chosen = [space for space in model.family.spaces if space in spaces]
    kinds = {SOLVERS[model.family.spaces[space].kind].collects for space in chosen}
    for kind, (what, more) in _NEEDS.items():
        if kind in kinds and kind not in statistics.index.collect:
            raise UserError(f"{what}, and {statistics.folder} has none: calibrate with --collect moments,gram{more}")
    return {space: dropped_counts(min(model.unit_counts(space)), points) for space in chosen}


def check_finite(effect: float, what: str, compute_dtype: torch.dtype) -> None:
    if not math.isfinite(effect):
        raise UserError(f"{what} is not finite: the model overflows in {compute_dtype}")


def without_units(count: int, name: str) -> str:
    """Describe what is measured, for a message."""
    return f"the output with {count} units of {name} dropped"


@dataclass(frozen=True)
class Variants:
    """A block with one of its sites pruned, for every site and count."""

    model: Model
    statistics: Statistics
    device: torch.device
    counts: Mapping[SpaceName, list[int]]

    def of(self, block: int, tensors: Mapping[str, Tensor], which: Container[int]) -> Iterator[dict[str, Tensor]]:
        """Yield the block's tensors for the variants whose numbers are in `which`, space by space, count by count.

        A block without a space stays as it is in that space's variants.
        """
        number = itertools.count()
        spaces = [space for space, counts in self.counts.items() if counts]
        present = [space for space in spaces if space in self.model.spaces(block)]
        read = CachedMoments(self.statistics, self.model).moments(block, tensors, present)
        moments: dict[SpaceName, Any] = {space: (sum_folds(folds).to(self.device),) for space, folds in read.items()}
        for space in spaces:
            chosen = [count for count in self.counts[space] if next(number) in which]
            if space not in present:
                yield from (dict(tensors) for _ in chosen)
                continue
            if not chosen:
                continue
            recipe = trial_recipe(self.model, block, space, tensors)
            # Scored once for all counts.
            scores = solver_of(self.model, recipe, space, self.device).scores(block, tensors, moments[space])
            for count in chosen:
                decision = SiteDecision(self.model.units(space, block) - count, scores=scores)
                decisions = Decisions(recipe, {Site(block, space): decision})
                padded = frozenset({space} if self.model.family.is_passed_on(space) else ())  # by blocks with all units
                pruner = Pruner(self.model, decisions, frozenset(), self.device, padded=padded)
                # Each of several processes has variants of its own.
                with working_in(ALONE):
                    pruned, _ = pruner.block(block, tensors, KnownMoments(moments))
                yield pruned


def trial_recipe(
    model: Model, block: int, space: SpaceName, tensors: Mapping[str, Tensor], score: str | None = None
) -> Recipe:
    """Return score and compensation of one space: any sound choice, but the same for all.

    Counts are decided already: the ratio means nothing. `score` replaces the usual one.
    """
    spaces = trial_spaces(model, block, [space], tensors)
    if score is not None:
        spaces[space]["score"] = score
    return FullRecipe.model_validate({"version": 1, "name": "effect", "spaces": spaces})


def trial_spaces(
    model: Model, block: int, spaces: Collection[SpaceName], tensors: Mapping[str, Tensor]
) -> dict[SpaceName, dict[str, Any]]:
    """Return the entries of spaces in the recipe of a trial."""
    entries: dict[SpaceName, dict[str, Any]] = {}
    for space in spaces:
        description = model.family.spaces[space]
        biased = model.tensor(block, description.measured, "bias") in tensors
        entries[space] = SOLVERS[description.kind].trial(biased=biased) | {"ratio": 0}
    return entries
