"""`sweep`: plans, or outputs that are measured, at several values of a key of a recipe, or of keys together."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.evaluation.image_classes import Classification
from ckpt_prune.evaluation.masked import MaskedScore
from ckpt_prune.evaluation.results import Result, ScoredResult, TextsResult
from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import begin
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.model.spaces import SpaceName, first_expert_spaces
from ckpt_prune.options.commands import EvaluateOptions, PlanOptions, PruneOptions, SweepOptions
from ckpt_prune.options.data import EvaluationOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.runner.changes import change_lines
from ckpt_prune.runner.evaluate import evaluate_model
from ckpt_prune.runner.plannable import check_plannable
from ckpt_prune.runner.prune import Pruned, prune_model
from ckpt_prune.runner.read_job import read_plan_job
from ckpt_prune.runner.read_recipe import read_recipe, recipe_of
from ckpt_prune.runner.refusals import refuse_prune
from ckpt_prune.runner.run_job import check_job
from ckpt_prune.runner.sweep_points import DepthPoint, SweepPoint, depth_points_at, point_of, point_of_output, points_at
from ckpt_prune.runner.sweep_values import OF_DATA, RATIO, keys_of, values_of, words

_GLANCED = 6
"""Values that stand in a line."""


@dataclass(frozen=True)
class Sweep:
    """The curve of a recipe: size and error at several values of one of its keys.

    Attributes:
        key: that varies; of several, which have the same value at every point, with commas between them.
        measured: what `SweepPoint.score` was measured on, in words; None if nothing was measured.
        metric: of `SweepPoint.score`: perplexity, masked_perplexity or top1.
        notes: what else a reader should know of the points.
        depth: if ratios vary and the statistics allow it, the same for whole blocks instead of units.
    """

    recipe: str
    spaces: tuple[SpaceName, ...]
    before: Cost
    points: tuple[SweepPoint, ...]
    key: str = RATIO
    measured: str | None = None
    metric: str = "perplexity"
    notes: tuple[str, ...] = ()
    depth: tuple[DepthPoint, ...] = ()

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
                **dict.fromkeys(keys_of(self.key), point.value),
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


@dataclass(frozen=True)
class Scores:
    """The score of a pruned model at one point of a sweep.

    Attributes:
        metric: perplexity, masked_perplexity or top1.
        score: of the pruned model; None if it is not finite.
        kl: divergence from the dense model, in nats per token or image; None if it is not finite.
        told: what was measured on, and the dense model's own score, in words.
    """

    metric: str
    score: float | None
    kl: float | None
    told: str


@dataclass(frozen=True)
class PointMeasurer:
    """How points are made and measured.

    Attributes:
        data: text files, or one folder of images.
        window: tokens per window of text.
        samples: windows, or images, at most.
        at: options of `prune` at a value.
    """

    model: Any
    data: tuple[Path, ...]
    window: int | None
    samples: int | None
    at: Callable[[float | str], dict[str, Any]]

    @property
    def images(self) -> Path | None:
        return self.data[0] if len(self.data) == 1 and self.data[0].is_dir() else None

    def check(self, *, of_images: bool) -> None:
        """Refuse data that cannot be measured on, for a model that is calibrated on images or on text."""
        if of_images and self.images is None:
            raise UserError("--images calibrates a model of images: give --evaluate DIR, a folder of images, too")
        if self.samples is not None and self.samples < 1:
            raise UserError(f"--evaluate-samples {self.samples}: at least one is needed")
        if self.images is not None:
            return
        evaluation = check_options(EvaluationOptions, {"text": self.data, "window": self.window})
        check_texts(evaluation.text)
        if evaluation.window is None:
            raise UserError("--evaluate needs --window: perplexities of different windows cannot be compared")

    def foresee(self, values: Sequence[float | str]) -> None:
        """Check every job before the first begins."""
        for value in values:
            with show_progress(False):
                dry_run = _prune(self.at(value), dry_run=True)
            assert dry_run.settled is not None
            check_job(dry_run.settled.job)  # a dry run needs no data

    def each(self, key: str, values: Sequence[float | str]) -> Iterator[tuple[Pruned, Scores]]:
        """Yield the result at every value, and print the value before."""
        say = Notices()
        for place, value in enumerate(values, start=1):
            say(f"{words(key, value)} ({place} of {len(values)})")
            yield self.measure_at(value)

    def measure_at(self, value: float | str) -> tuple[Pruned, Scores]:
        """Prune at a value into a temporary folder, and measure the output."""
        options = self.at(value)
        how = {name: options[name] for name in ("device", "progress", "trust_remote_code")}
        data: Mapping[str, Any] = {"text": self.data, "window": self.window}
        if self.images is not None:
            data = {"images": self.images}
        with scratch_folder() as folder:
            small = _prune(options, output=str(folder / "point"), diagnostics=False, evaluate_samples=0)
            measured = {"model": small, "against": self.model, "samples": self.samples, **data, **how}
            return small, _scores(evaluate_model(check_options(EvaluateOptions, measured)))


def _prune(given: dict[str, Any], **more: Any) -> Pruned:
    options = check_options(PruneOptions, given | more)
    refuse_prune(options)
    return prune_model(options, read_recipe(options))


def _scores(result: Result) -> Scores:
    if isinstance(result, TextsResult) and result.together is not None:
        result = result.together
    if not isinstance(result, ScoredResult):
        raise UserError("--evaluate measures a perplexity of text or classes of images, which this model has not")
    assert result.reference is not None
    if isinstance(result.score, Classification):
        metric, on, value = "top1", f"{result.score.images} images", result.score.top1
        dense_top1 = result.reference.top1
        dense = "top-1 (no labels)" if dense_top1 is None else f"top-1 (dense: {dense_top1:.1%})"
    else:
        metric, on = "perplexity", f"{result.score.windows} windows"
        if isinstance(result.score, MaskedScore):
            metric, on = "masked_perplexity", f"{result.score.tokens} masked tokens"
        dense = f"{metric.replace('_', ' ')} (dense: {result.reference.perplexity:.3f})"
        on, value = f"{on} of {result.score.window} tokens", result.score.perplexity
    score, kl = (each if each is not None and isfinite(each) else None for each in (value, result.kl))
    return Scores(metric, score, kl, f"{dense} and KL on {on}")


def sweep_model(options: SweepOptions) -> Sweep:
    """Plan a model, or prune and measure it, at several values (`ckpt_prune.sweep`)."""
    key, values = values_of(options)
    calibrated = bool(options.text or options.images)
    named = ("model", "recipe", "statistics", "container", "family", "part", "trust_remote_code", "device", "progress")
    shared = {name: getattr(options, name) for name in named}
    changes = options.overrides
    data = {name: getattr(options, name) for name in ("text", "images", "samples", "window") if calibrated}

    def at(value: float | str) -> dict[str, Any]:
        if key == RATIO:
            return shared | {"overrides": changes, "ratio": float(value)}
        if key in OF_DATA:
            return shared | {"overrides": changes, key: value}
        return shared | {"overrides": (*changes, *(f"{each}={value}" for each in keys_of(key)))}

    measuring = None
    if options.evaluate:
        measuring = PointMeasurer(
            options.model, options.evaluate, options.window, options.evaluate_samples, lambda value: data | at(value)
        )
        measuring.check(of_images=bool(options.images))
    recipes = [_recipe_at(words(key, value), at(value)) for value in values]
    plannable = _check_plannable(recipes, measured=measuring is not None)
    if measuring is not None and (calibrated or not plannable):
        return _measure_only(key, values, measuring)
    curve = _plan_points(key, values, at, shared | {"overrides": changes})
    return curve if measuring is None else _add_scores(curve, measuring)


def _recipe_at(given: str, options: dict[str, Any]) -> Recipe:
    """Read the recipe at a value. An error names --sweep instead of the option that it stands for."""
    try:
        plan_options = {name: value for name, value in options.items() if name not in OF_DATA}
        return recipe_of(check_options(PlanOptions, plan_options))[1]
    except UserError as error:
        raise UserError(f"--sweep {given}: {re.sub('^--(set|ratio [^:]*): ', '', str(error))}") from error


def _check_plannable(recipes: Sequence[Recipe], *, measured: bool) -> bool:
    """Return True if plans can describe the recipes; UserError if they cannot and nothing is measured."""
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
    def job_of(options: Mapping[str, Any]) -> Job:
        plan_options = check_options(PlanOptions, {**options, "diagnostics": False})
        job = read_plan_job(plan_options, *recipe_of(plan_options))
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
    scores = [score for _, score in measuring.each(curve.key, [point.value for point in curve.points])]
    points = [_add_score(point, score) for point, score in zip(curve.points, scores, strict=True)]
    return replace(curve, points=tuple(points), measured=scores[0].told, metric=scores[0].metric)


def _measure_only(key: str, values: Sequence[float | str], measuring: PointMeasurer) -> Sweep:
    measuring.foresee(values)
    points = []
    for value, (pruned, score) in zip(values, measuring.each(key, values), strict=True):
        assert pruned.settled is not None
        assert pruned.report is not None
        points.append(_add_score(point_of_output(value, pruned.settled, pruned.report), score))
        settled, scores = pruned.settled, score
    recipe = settled.recipe
    spaces = tuple(first_expert_spaces(recipe.spaces))
    notes = tuple(change_lines(settled))
    return Sweep(recipe.name, spaces, settled.before, tuple(points), key, scores.told, scores.metric, notes)


def _add_score(point: SweepPoint, scores: Scores) -> SweepPoint:
    return replace(point, score=scores.score, measured=scores.kl)
