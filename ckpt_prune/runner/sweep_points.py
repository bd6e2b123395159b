"""The size/error curve of a recipe: plans at several values of a key; of ratios from one ranking of the units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import Prepared, RankedUnits, begin
from ckpt_prune.job.records import SiteRecord
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.model.depth import can_shorten, shorten_model
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName, first_expert_spaces
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.runner.plan import make_plan, prepare_plan
from ckpt_prune.stages.depth.runs import least_runs
from ckpt_prune.stages.folders import find_functions
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.spaces.widths import dense_ranking


@dataclass(frozen=True)
class SweepPoint:
    """The output of a recipe at one value of a key.

    Attributes:
        value: of the key: a share of units to drop, or what else varies.
        after: cost of the output.
        widths: space → least and most units kept in a block.
        errors: space → mean predicted error of its sites after compensation, relative to each output's energy (on
            held-out folds where the statistics have several and something is chosen on them); None without second
            moments.
        divergence: what all errors together are predicted to do to the model's own output; None where that was not
            measured.
        blocks: that stay; None where the recipe drops none.
        dimensions: of the residual stream that stay; likewise.
        score: of the pruned model on held-out data; None where it was not measured, or is not finite.
        measured: what `divergence` predicts, KL(dense ‖ pruned) on that data, nats a token or an image; None as of
            `score`.
    """

    value: float | str
    after: Cost
    widths: dict[SpaceName, tuple[int, int]]
    errors: dict[SpaceName, float | None]
    divergence: float | None = None
    blocks: int | None = None
    dimensions: int | None = None
    score: float | None = None
    measured: float | None = None


@dataclass(frozen=True)
class DepthPoint:
    """The run of whole blocks that would go in place of units at one ratio: that of the least predicted divergence.

    Attributes:
        ratio: share of the blocks that go.
        gone: how many that is.
        after: cost of the output.
        divergence: predicted of the model's own output, without a map in their place.
    """

    ratio: float
    gone: int
    after: Cost
    divergence: float


def depth_points_at(job: Job, ratios: Sequence[float]) -> list[DepthPoint]:
    """Drop whole blocks instead, at several ratios; nothing where the statistics do not say what that does.

    Args:
        ratios: shares of the blocks to drop; those that round to none, or leave none, are left out.
    """
    model, statistics = job.model, job.statistics
    distances = None if statistics is None else statistics.index.stream
    if distances is None or distances.divergence is None or model.blocks < 2 or model.checkpoint.within is not None:
        return []
    allowed = [block for block in range(model.blocks) if block or can_shorten(model, range(1, model.blocks))]
    points: list[DepthPoint] = []
    for ratio in ratios:
        count = round(ratio * model.blocks)
        gone = least_runs(distances.divergence, count, 1, allowed) if 0 < count < model.blocks else None
        kept = [block for block in range(model.blocks) if block not in (gone or ())]
        if gone is not None and can_shorten(model, kept):
            after = cost_of(shorten_model(model, kept))
            points.append(DepthPoint(ratio, count, after, distances.divergence[gone[0]][gone[-1] + 1]))
    return points


def points_at(job: Job, ratios: Sequence[float]) -> list[SweepPoint]:
    """Plan a job at several ratios.

    Args:
        job: with dense statistics, if its recipe needs any; its own ratio or size is not used.
    """
    recipe, ranked = job.recipe, None
    if recipe.needs_moments and job.statistics is not None and not recipe.ranks_blocks:
        ranked = dense_ranking(begin(job))
    return [point_of(ratio, replace(job, recipe=recipe.with_ratio(ratio)), ranked) for ratio in ratios]


def point_of(value: float | str, job: Job, ranked: Mapping[Site, Sequence[RankedUnits]] | None = None) -> SweepPoint:
    """Plan a job at a value that its recipe has."""
    start = begin(job)
    plan = make_plan(prepare_plan(job, ranked))
    point = _point(value, start.model, start.recipe, plan.sites, plan.after)
    blocks = None if plan.depth is None else len(plan.depth.kept)
    return replace(point, divergence=plan.divergence, blocks=blocks)


def point_of_output(value: float | str, prepared: Prepared, report: Report) -> SweepPoint:
    """Return the point of a finished prune, whose recipe has the value."""
    point = _point(value, prepared.model, prepared.recipe, report.sites, report.after)
    axes: dict[str, int] = {}
    for size_axes in find_functions("size_axes", "show"):
        axes |= size_axes(report)
    return replace(point, blocks=axes.get("blocks"), dimensions=axes.get("dimensions"))


def _point(value: float | str, model: Model, recipe: Recipe, records: Sequence[SiteRecord], after: Cost) -> SweepPoint:
    first = first_expert_spaces(recipe.spaces)
    spaces = {space: [site for site in records if site.space == space] for space in first}
    kept = {s: [len(site.kept) // model.copies(first[s]) for site in sites] for s, sites in spaces.items()}
    widths = {space: (min(counts), max(counts)) for space, counts in kept.items()}
    errors = {space: _mean_error(sites) for space, sites in spaces.items()}
    return SweepPoint(value, after, widths, errors)


def _mean_error(sites: Sequence[SiteRecord]) -> float | None:
    site_errors = [site.error_compensated if site.error_held_out is None else site.error_held_out for site in sites]
    # A site that loses nothing has no error; one without second moments has none that is known.
    is_whole = [len(site.kept) == site.units for site in sites]
    errors = [0.0 if w else e for w, e in zip(is_whole, site_errors, strict=True)]
    return None if None in errors else fmean(e for e in errors if e is not None)
