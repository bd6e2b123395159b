"""`ckpt_prune.sweep`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.function import takes
from ckpt_prune.api.sweep_measuring import PointMeasurer, Scores
from ckpt_prune.api.sweep_values import OF_DATA, RATIO, asked_values, words
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.options.commands import PlanOptions, SweepOptions
from ckpt_prune.options.option import check_options

if TYPE_CHECKING:
    from ckpt_prune.job.job import Job
    from ckpt_prune.model.cost_record import Cost
    from ckpt_prune.model.spaces import SpaceName
    from ckpt_prune.recipe.recipe import Recipe
    from ckpt_prune.runner.sweep import DepthPoint, SweepPoint


_GLANCED = 6
"""Values that stand in a line."""


@dataclass(frozen=True)
class Sweep:
    """The curve of a recipe: size and error at several values of one of its keys.

    Attributes:
        measured: what `SweepPoint.score` was measured on, in words; None if nothing was measured.
        metric: of `SweepPoint.score`: perplexity, masked_perplexity or top1.
        notes: what else a reader should know of the points.
        depth: if ratios vary and the statistics allow it, the same for whole blocks instead of units.
    """

    recipe: str
    spaces: tuple["SpaceName", ...]
    before: "Cost"
    points: tuple["SweepPoint", ...]
    key: str = RATIO
    measured: str | None = None
    metric: str = "perplexity"
    notes: tuple[str, ...] = ()
    depth: tuple["DepthPoint", ...] = ()

    def __repr__(self) -> str:
        values = [point.value for point in self.points]
        return short_repr(
            self,
            recipe=self.recipe,
            key=self.key,
            values=values if len(values) <= _GLANCED else f"{values[0]} to {values[-1]}",
            points=len(values),
            before=self.before,
            measured=self.measured,
        )

    def data(self) -> dict[str, Any]:
        rows = []
        for point in self.points:
            row = {
                self.key: point.value,
                **point.after.model_dump(),
                "widths": point.widths,
                "errors": point.errors,
                "divergence": point.divergence,
                **({} if point.blocks is None else {"blocks": point.blocks}),
                **({} if point.dimensions is None else {"dimensions": point.dimensions}),
            }
            rows.append(row if self.measured is None else row | {self.metric: point.score, "kl": point.measured})
        blocks = [
            {"ratio": own.ratio, "gone": own.gone, **own.after.model_dump(), "divergence": own.divergence}
            for own in self.depth
        ]
        values = {"recipe": self.recipe, "before": self.before.model_dump(), "points": rows, "depth": blocks}
        values |= {"messages": list(self.notes)} if self.notes else {}
        return values if self.measured is None else values | {"measured": self.measured}


@takes(SweepOptions)
def sweep(options: SweepOptions) -> Sweep:
    """Plan MODEL at several values of a recipe's key, as `ckpt-prune plan --sweep` does.

    With `evaluate`, every point is pruned into a temporary folder, loaded whole and measured, too. Recipes that no plan
    can describe (masks, factors, rotations, a narrower stream, blocks besides units) and points that are calibrated on
    `text` or `images` are only measured.
    """
    ratios = options.values
    key, values = asked_values(ratios) if isinstance(ratios, str) else (RATIO, [float(ratio) for ratio in ratios])
    calibrated = bool(options.text) or options.images is not None
    _check_together(options, key, calibrated)
    named = ("model", "recipe", "statistics", "container", "family", "part", "trust_remote_code", "device", "progress")
    given = {name: getattr(options, name) for name in named}
    changes = options.overrides
    data = {name: getattr(options, name) for name in ("text", "images", "samples", "window") if calibrated}

    def at(value: float | str) -> dict[str, Any]:
        if key == RATIO:
            return given | {"overrides": changes, "ratio": float(value)}
        if key in OF_DATA:
            return given | {"overrides": changes, key: value}
        return given | {"overrides": (*changes, f"{key}={value}")}

    measuring = None
    if options.evaluate:
        measuring = PointMeasurer(
            options.model, options.evaluate, options.window, options.evaluate_samples, lambda value: data | at(value)
        )
        measuring.check(of_images=options.images is not None)
    recipes = [_recipe_at(words(key, value), at(value)) for value in values]
    plannable = _check_plannable(recipes, measured=measuring is not None)
    if measuring is not None and (calibrated or not plannable):
        return _measure_only(key, values, measuring)
    curve = _plan_points(key, values, at, given | {"overrides": changes})
    return curve if measuring is None else _add_scores(curve, measuring)


def _recipe_at(given: str, options: dict[str, Any]) -> "Recipe":
    """Read the recipe at a value. An error names --sweep instead of the option that it stands for."""
    from ckpt_prune.runner.read_recipe import recipe_of

    try:
        plan_options = {name: value for name, value in options.items() if name not in OF_DATA}
        return recipe_of(check_options(PlanOptions, plan_options))[1]
    except UserError as error:
        raise UserError(f"--sweep {given}: {re.sub('^--(set|ratio [^:]*): ', '', str(error))}") from error


def _check_together(options: SweepOptions, key: str, calibrated: bool) -> None:
    if not options.evaluate and (options.window is not None or options.evaluate_samples is not None):
        raise UserError("--window and --evaluate-samples are of what points are measured on: give --evaluate FILE")
    if calibrated and not options.evaluate:
        raise UserError(
            "--text and --images calibrate every point of a --sweep anew, to be measured: give --evaluate FILE, or "
            "plan from --statistics"
        )
    if not calibrated and (options.samples is not None or key in OF_DATA):
        name = f"--sweep {key}" if options.samples is None else "--samples"
        raise UserError(f"{name} is of --text or --images")


def _check_plannable(recipes: "Sequence[Recipe]", *, measured: bool) -> bool:
    """Return True if plans can describe the recipes; UserError if they cannot and nothing is measured."""
    from ckpt_prune.runner.plannable import check_plannable

    try:
        for recipe in recipes:
            check_plannable(recipe)
    except UserError as error:
        if measured:
            return False
        raise UserError(f"{error}; with --evaluate FILE every value of a --sweep is pruned and measured") from error
    return not any(recipe.perplexity_grid for recipe in recipes)


def _plan_points(
    key: str,
    values: Sequence[float | str],
    at: Callable[[float | str], dict[str, Any]],
    given: dict[str, Any],
) -> Sweep:
    from ckpt_prune.job.prepared import begin
    from ckpt_prune.model.cost import cost_of
    from ckpt_prune.model.spaces import first_expert_spaces
    from ckpt_prune.runner.changes import change_lines
    from ckpt_prune.runner.read_job import read_plan_job
    from ckpt_prune.runner.read_recipe import recipe_of
    from ckpt_prune.runner.run_job import check_job
    from ckpt_prune.runner.sweep import depth_points_at, point_of, points_at

    def job_of(options: Mapping[str, Any]) -> "Job":
        given = check_options(PlanOptions, {**options, "diagnostics": False})
        job = read_plan_job(given, *recipe_of(given))
        check_job(job)
        return job

    blocks: list[DepthPoint] = []
    if key == RATIO:
        ratios = [float(ratio) for ratio in values]
        job = job_of(given)
        job.model.checkpoint.check_finite()
        points, blocks = points_at(job, ratios), depth_points_at(job, ratios)
    else:
        # All are checked before the first is planned.
        jobs = [job_of(at(value)) for value in values]
        job = jobs[0]
        job.model.checkpoint.check_finite()
        points = [point_of(value, each) for value, each in zip(values, jobs, strict=True)]
    start = begin(job)
    spaces = tuple(first_expert_spaces(start.recipe.spaces))
    notes = tuple(change_lines(start))
    name, before = start.recipe.name, cost_of(job.model)
    return Sweep(name, spaces, before, tuple(points), key, notes=notes, depth=tuple(blocks))


def _add_scores(curve: Sweep, measuring: PointMeasurer) -> Sweep:
    scores = [own for _, own in measuring.each(curve.key, [point.value for point in curve.points])]
    points = [_add_score(point, own) for point, own in zip(curve.points, scores, strict=True)]
    return replace(curve, points=tuple(points), measured=scores[0].told, metric=scores[0].metric)


def _measure_only(key: str, values: Sequence[float | str], measuring: PointMeasurer) -> Sweep:
    from ckpt_prune.model.spaces import first_expert_spaces
    from ckpt_prune.runner.changes import change_lines
    from ckpt_prune.runner.sweep import point_of_output

    measuring.foresee(values)
    points = []
    for value, (pruned, own) in zip(values, measuring.each(key, values), strict=True):
        assert pruned.settled is not None
        assert pruned.report is not None
        points.append(_add_score(point_of_output(value, pruned.settled, pruned.report), own))
        settled, scores = pruned.settled, own
    recipe = settled.recipe
    spaces = tuple(first_expert_spaces(recipe.spaces))
    notes = tuple(change_lines(settled))
    return Sweep(recipe.name, spaces, settled.before, tuple(points), key, scores.told, scores.metric, notes)


def _add_score(point: "SweepPoint", scores: Scores) -> "SweepPoint":
    return replace(point, score=scores.score, measured=scores.kl)
