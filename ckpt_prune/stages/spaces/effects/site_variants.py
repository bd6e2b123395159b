"""One site of the dense model pruned at a time, at several widths: what effects are measured or predicted of."""

import itertools
import math
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.decisions import Decision, Decisions
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.measure.moment_sources import CachedMoments, KnownMoments
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName
from ckpt_prune.parallel.group import ALONE, working_in
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.pruner import Pruner
from ckpt_prune.stages.spaces.solvers import SOLVERS, solver_of

POINTS = (0.25, 0.5, 0.75)
"""Shares of a site's units that are dropped while the others are whole."""


def dropped_counts(units: int, points: tuple[float, ...]) -> list[int]:
    """Units to drop at these shares: distinct, ascending, from 1 to all but one; none of a single unit."""
    return sorted({min(units - 1, max(1, round(units * point))) for point in points}) if units > 1 else []


_NEEDS = {
    "gram": ("effects need Grams", ""),
    "logits": ("effects of q and k need their moments", ",logits"),
    "rotary": ("effects of rotary pairs need their moments", ",rotary"),
}


def counts_of(
    model: Model, statistics: Statistics, spaces: Collection[SpaceName], points: tuple[float, ...]
) -> dict[SpaceName, list[int]]:
    """Units to drop of a site of every space, in the family's order.

    Raises:
        UserError: statistics lack what variants of these spaces are made from.
    """
    family = model.family
    chosen = [space for space in family.spaces if space in spaces]
    _check_moments(statistics, {SOLVERS[family.spaces[space].ends].collects for space in chosen})
    return {space: dropped_counts(model.units(space), points) for space in chosen}


def _check_moments(statistics: Statistics, kinds: set[str]) -> None:
    for kind, (what, beside) in _NEEDS.items():
        if kind in kinds and kind not in statistics.index.collect:
            raise UserError(f"{what}, and {statistics.folder} has none: calibrate with --collect moments,gram{beside}")


def check_finite(effect: float, what: str, compute_dtype: torch.dtype) -> None:
    """Refuse an effect that is no number.

    Args:
        effect: what was measured.
        what: it is of, for the message.
        compute_dtype: in which blocks ran.

    Raises:
        UserError: with what it is of.
    """
    if not math.isfinite(effect):
        raise UserError(f"{what} is not finite: the model overflows in {compute_dtype}")


def without_units(count: int, name: str) -> str:
    """What is measured where units of a site, or of a space, are dropped."""
    return f"the output with {count} units of {name} dropped"


@dataclass(frozen=True)
class Variants:
    """A block with one of its sites pruned, for every site and count."""

    model: Model
    statistics: Statistics
    device: torch.device
    counts: Mapping[SpaceName, list[int]]

    def of(self, block: int, tensors: Mapping[str, Tensor], which: Container[int]) -> Iterator[dict[str, Tensor]]:
        """The block's tensors, space by space and count by count; of these, those that are `which` in that order."""
        number = itertools.count()
        wanted = [space for space, counts in self.counts.items() if counts]
        read = CachedMoments(self.statistics, self.model).moments(block, tensors, wanted)
        moments: dict[SpaceName, Any] = {space: (sum_folds(folds).to(self.device),) for space, folds in read.items()}
        for space in wanted:
            recipe = trial_recipe(self.model, block, space, tensors)
            own = [count for count in self.counts[space] if next(number) in which]
            if not own:
                continue
            # RankedUnits once for all counts.
            scores = solver_of(self.model, recipe, space, self.device).scores(block, tensors, moments[space])
            for count in own:
                decision = Decision(self.model.units(space) - count, scores=scores)
                decisions = Decisions(recipe, {Site(block, space): decision})
                pruner = Pruner(self.model, decisions, frozenset(), self.device)
                # Each of several processes has variants of its own.
                with working_in(ALONE):
                    found, _ = pruner.block(block, tensors, KnownMoments(moments))
                yield found


def trial_recipe(
    model: Model, block: int, space: SpaceName, tensors: Mapping[str, Tensor], score: str | None = None
) -> Recipe:
    """Score and compensation of one space, any but the same for all; counts are settled, so the ratio says nothing.

    Args:
        model: the dense model.
        block: index of the block.
        space: of it.
        tensors: its own, by on-disk name.
        score: in place of the usual one.
    """
    own = trial_spaces(model, block, [space], tensors)
    if score is not None:
        own[space]["score"] = score
    return FullRecipe.model_validate({"version": 1, "name": "effect", "spaces": own})


def trial_spaces(
    model: Model, block: int, spaces: Collection[SpaceName], tensors: Mapping[str, Tensor]
) -> dict[SpaceName, dict[str, Any]]:
    """What the recipe of a trial says of spaces, as `trial_recipe`."""
    found: dict[SpaceName, dict[str, Any]] = {}
    for space in spaces:
        description = model.family.spaces[space]
        biased = model.tensor(block, description.measured, "bias") in tensors
        found[space] = SOLVERS[description.ends].trial(biased=biased) | {"ratio": 0}
    return found
