"""FLAP's rankings: the units of all blocks in one list, or in one for each space (METHODS section 2)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ckpt_prune.architectures.family import SpaceName
from ckpt_prune.calibration.moments import Moments, total
from ckpt_prune.planning.selection import Site, select_ranked, standardise
from ckpt_prune.progress import track

if TYPE_CHECKING:
    from ckpt_prune.transform.job import Job


def standardised_scores(job: "Job") -> dict[Site, Tensor]:
    """FLAP's adaptive metric of every unit."""
    sites, source = job.unsettled.sites, job.source()
    scores: dict[Site, Tensor] = {}
    for block in track(range(job.blocks), "ranking", total=job.blocks):
        spaces = list(job.recipe.spaces)
        moments = source.moments(block, {}, spaces)
        for space in spaces:
            name = job.family.tensor(block, job.family.columns[space].consumer)
            weight = job.checkpoint.read([name])[name].to(job.device)
            folds = tuple(m for m in moments.get(space, ()) if isinstance(m, Moments))
            whole = _vectors(folds).to(job.device) if folds else None
            columns = sites.column_scores(space, weight, whole)
            scores[block, space] = standardise(columns, job.family.unit_columns(job.config, space))
    return scores


def _vectors(folds: tuple[Moments, ...]) -> Moments:
    """Sum of folds without their Grams, which a ranking does not need."""
    return total(tuple(replace(fold, gram=None) for fold in folds))


def ranked(job: "Job", scores: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
    """Units that stay under FLAP's ranking over layers, or over layers and spaces, at the recipe's ratio.

    Args:
        job: for its recipe.
        scores: of `standardised_scores`.
    """
    costs: dict[SpaceName, float] = {space: float(_unit_parameters(job, space)) for space in job.recipe.spaces}
    if job.recipe.allocation == "across-layers":
        kept: dict[Site, Tensor] = {}
        for space in job.recipe.spaces:
            own = {site: s for site, s in scores.items() if site[1] == space}
            units = sum(s.numel() for s in own.values())
            kept |= select_ranked(own, {space: 1.0}, (1 - job.recipe.ratio_of(space)) * units)
        return kept
    budget = 0.0
    for site, own_scores in scores.items():
        budget += own_scores.numel() * costs[site[1]] * (1 - job.recipe.ratio_of(site[1]))
    return select_ranked(scores, costs, budget)


def _unit_parameters(job: "Job", space: SpaceName) -> int:
    """Weights that go with one unit of a space."""
    description = job.family.columns[space]
    units = job.family.units(job.config, space)
    rows = sum(job.checkpoint.tensors[job.family.tensor(0, m)].shape[0] for m in description.producers)
    columns = job.family.unit_columns(job.config, space)
    return (rows // units + columns) * job.family.dimension(job.config, "hidden")
