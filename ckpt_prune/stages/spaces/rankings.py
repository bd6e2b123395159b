"""FLAP's rankings: the units of all blocks in one list, or in one for each space (scoring/README.md, section 3)."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ckpt_prune.common.progress import track
from ckpt_prune.measure.moment_sources import MomentSource
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import select_input_moments
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.scoring.selection import select_ranked, standardise
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver


def standardised_scores(model: Model, recipe: Recipe, source: MomentSource, device: torch.device) -> dict[Site, Tensor]:
    """Return FLAP's adaptive metric of every unit; with across-layers-raw the mean of its columns' own scores."""
    scores: dict[Site, Tensor] = {}
    for block in track(model.spaced_blocks, "ranking", total=len(model.spaced_blocks)):
        spaces = [space for space in recipe.spaces if space in model.spaces(block)]
        moments = source.moments(block, {}, spaces)
        for space in spaces:
            solver = ColumnSolver(model, recipe, space, device)
            name = model.tensor(block, solver.description.consumer)
            weight = model.checkpoint.read([name])[name].to(device)
            folds = select_input_moments(moments.get(space))
            # A ranking does not need Grams.
            summed = sum_folds([replace(fold, gram=None) for fold in folds]).to(device) if folds else None
            columns, per_unit = solver.column_scores(weight, summed), model.unit_columns(space)
            raw = recipe.allocation == "across-layers-raw"
            scores[Site(block, space)] = columns.view(-1, per_unit).mean(1) if raw else standardise(columns, per_unit)
    return scores


def keep_ranked(model: Model, recipe: Recipe, scores: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
    """Return the units that stay under FLAP's ranking over layers, or over layers and spaces, at the recipe's ratio.

    `scores` are those of `standardised_scores`.
    """
    if recipe.allocation in ("across-layers", "across-layers-raw"):
        kept: dict[Site, Tensor] = {}
        for space in recipe.spaces:
            of_space = {site: s for site, s in scores.items() if site.space == space}
            units = sum(s.numel() for s in of_space.values())
            kept |= select_ranked(of_space, {space: 1.0}, (1 - recipe.ratio_of(space)) * units)
        return kept
    costs: dict[SpaceName, float] = {space: float(model.unit_weights(space)) for space in recipe.spaces}
    code = recipe.allocation == "across-layers-and-spaces-code"
    if code:
        # An integer tensor holds what a head weighs there: 170 of 512/3 columns in LLaMA-7B.
        least = min(costs.values())
        costs = {space: float(int(cost / least)) for space, cost in costs.items()}
    budget = 0.0
    for site, of_site in scores.items():
        budget += of_site.numel() * costs[site.space] * (1 - recipe.ratio_of(site.space))
    return select_ranked(scores, costs, budget, below_cut=code)
