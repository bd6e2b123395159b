"""`ckpt_prune.sweep`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.sweep_measuring import Measuring, Scores
from ckpt_prune.api.sweep_values import OF_DATA, RATIO, asked_values, words
from ckpt_prune.api.types import AnyModel, AnyPath, Texts
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import show_progress
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.options import PartName, PlanOptions, checked

if TYPE_CHECKING:
    from ckpt_prune.job.job import Job
    from ckpt_prune.job.recipe import Recipe
    from ckpt_prune.job.records import Cost
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.model.spaces import SpaceName
    from ckpt_prune.runner.sweep import DepthPoint, Point


_GLANCED = 6
"""Values that stand in a line."""


@dataclass(frozen=True)
class Sweep:
    """The curve of a recipe: size and error at several values of one of its keys.

    Attributes:
        recipe: its name.
        key: the recipe's key that varies; `ratio` is that of every space.
        spaces: that it prunes.
        before: size of the dense model.
        points: one for each value.
        measured: what `Point.score` is of, in words; None where nothing was measured.
        metric: what `Point.score` is: perplexity, masked_perplexity or top1.
        notes: what else a reader should know of the points.
        depth: where ratios vary, the same of whole blocks in place of units, where the statistics say what they do.
    """

    recipe: str
    spaces: tuple["SpaceName", ...]
    before: "Cost"
    points: tuple["Point", ...]
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
        """As `--json` prints it."""
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
        found = {"recipe": self.recipe, "before": self.before.model_dump(), "points": rows, "depth": blocks}
        found |= {"messages": list(self.notes)} if self.notes else {}
        return found if self.measured is None else found | {"measured": self.measured}


def sweep(
    model: AnyModel,
    values: str | Sequence[float],
    *,
    recipe: AnyPath | None = None,
    statistics: "AnyPath | Statistics | None" = None,
    text: Texts = (),
    images: AnyPath | None = None,
    samples: int | None = None,
    window: int | None = None,
    overrides: Mapping[str, object] | Sequence[str] = (),
    evaluate: Texts = (),
    evaluate_samples: int | None = None,
    container: str | None = None,
    family: AnyPath | None = None,
    part: PartName | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Sweep:
    """Plan, or prune and measure, at several values of a recipe's key, as `ckpt-prune plan --sweep` does.

    What no plan says (masks, factors, rotations, a narrower stream, blocks beside units), and what is calibrated on
    `text` or `images`, is pruned at each value and measured on `evaluate`.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        values: ratios, as numbers or as "FROM:TO:STEP", both ends included; or "KEY=FROM:TO:STEP" or "KEY=A,B,C" of any
            key that `overrides` may have, of `samples` or of `seed`.
        recipe: a shipped recipe's name or a file; None for the default.
        statistics: what `calibrate` gave, or its folder.
        text: files that every point is calibrated on, in place of statistics.
        images: folder of images, likewise.
        samples: windows of `text`, or images.
        window: tokens of a window of `text` and of `evaluate`.
        overrides: changes of the recipe's keys, dotted.
        evaluate: text, or a folder of images, that every point is measured on: the model is pruned into a temporary
            folder for it, and loaded whole.
        evaluate_samples: windows, or images, of `evaluate`, at most.
        container: what the output is to be stored as.
        family: file of a description of the model's family, where this version has none.
        part: which part of a model that is made of several: text, vision or encoder.
        trust_remote_code: accept a model that asks for code of its own.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars on stderr.

    Raises:
        UserError: as `plan`, `prune` and `evaluate`, or a value that the recipe does not take.
    """
    key, wanted = asked_values(values) if isinstance(values, str) else (RATIO, [float(ratio) for ratio in values])
    data = {"text": text, "images": images}
    calibrated = bool(text) or images is not None
    _check_together(key, calibrated, evaluate, samples, window, evaluate_samples)
    named = ("model", "recipe", "statistics", "container", "family", "part", "trust_remote_code", "device", "progress")
    given = {name: value for name, value in locals().items() if name in named}
    changes = [f"{k}={v}" for k, v in overrides.items()] if isinstance(overrides, Mapping) else [*overrides]

    def at(value: float | str) -> dict[str, Any]:
        """Options of a command at one value."""
        if key == RATIO:
            return given | {"overrides": changes, "ratio": float(value)}
        if key in OF_DATA:
            return given | {"overrides": changes, key: value}
        return given | {"overrides": [*changes, f"{key}={value}"]}

    def prune_at(value: float | str) -> dict[str, Any]:
        """The same, with what to calibrate on."""
        own = {**data, "samples": samples, "window": window} if calibrated else {}
        return own | at(value)

    measuring = None
    if evaluate:
        files = [evaluate] if isinstance(evaluate, str | PathLike) else evaluate
        measuring = Measuring(model, tuple(Path(file) for file in files), window, evaluate_samples, prune_at)
        measuring.check(of_images=images is not None)
    recipes = [_recipe_at(words(key, value), at(value)) for value in wanted]
    with show_progress(progress):
        plannable = _said_by_plans(recipes, measured=measuring is not None)
        if measuring is not None and (calibrated or not plannable):
            return _outputs(key, wanted, measuring)
        found = _plans(key, wanted, at, given | {"overrides": changes})
        return found if measuring is None else _with_scores(found, measuring)


def _recipe_at(given: str, options: dict[str, Any]) -> "Recipe":
    """The recipe at a value; what is wrong with it is said of the sweep, not of the option that it stands for."""
    from ckpt_prune.runner.read_recipe import recipe_of

    try:
        return recipe_of(checked(PlanOptions, options))[1]
    except UserError as error:
        raise UserError(f"--sweep {given}: {re.sub('^--(set|ratio [^:]*): ', '', str(error))}") from error


def _check_together(
    key: str, calibrated: bool, evaluate: Texts, samples: int | None, window: int | None, evaluate_samples: int | None
) -> None:
    """Refuse options that say nothing without others."""
    if not evaluate and (window is not None or evaluate_samples is not None):
        raise UserError("--window and --evaluate-samples are of what points are measured on: give --evaluate FILE")
    if calibrated and not evaluate:
        raise UserError(
            "--text and --images calibrate every point of a --sweep anew, to be measured: give --evaluate FILE, or "
            "plan from --statistics"
        )
    if not calibrated and (samples is not None or key in OF_DATA):
        raise UserError(f"{'--samples' if samples is not None else f'--sweep {key}'} is of --text or --images")


def _said_by_plans(recipes: "Sequence[Recipe]", *, measured: bool) -> bool:
    """Whether plans can say what recipes do.

    Args:
        recipes: one for each value.
        measured: whether values are measured besides, which needs no plan.

    Raises:
        UserError: plans cannot, and nothing is measured.
    """
    from ckpt_prune.runner.plan import check_plannable

    try:
        for recipe in recipes:
            check_plannable(recipe)
    except UserError as error:
        if measured:
            return False
        raise UserError(f"{error}; with --evaluate FILE every value of a --sweep is pruned and measured") from error
    return not any(recipe.perplexity_grid for recipe in recipes)


def _plans(
    key: str,
    values: Sequence[float | str],
    at: Callable[[float | str], dict[str, Any]],
    given: dict[str, Any],
) -> Sweep:
    """Points that are predicted from statistics."""
    from ckpt_prune.job.cost import cost_of
    from ckpt_prune.job.prepared import begin
    from ckpt_prune.model.spaces import first_expert_spaces
    from ckpt_prune.runner.messages import cache_line
    from ckpt_prune.runner.read_job import read_plan_job
    from ckpt_prune.runner.read_recipe import recipe_of
    from ckpt_prune.runner.run_job import check_job
    from ckpt_prune.runner.sweep import depth_points_at, point_of, points_at

    def job_of(options: Mapping[str, Any]) -> "Job":
        given = checked(PlanOptions, {**options, "diagnostics": False})
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
    notes = tuple(filter(None, [cache_line(start)]))
    name, before = start.recipe.name, cost_of(job.model)
    return Sweep(name, spaces, before, tuple(points), key, notes=notes, depth=tuple(blocks))


def _with_scores(found: Sweep, measuring: Measuring) -> Sweep:
    """The same, each point measured besides."""
    scores = [own for _, own in measuring.each(found.key, [point.value for point in found.points])]
    points = [_scored(point, own) for point, own in zip(found.points, scores, strict=True)]
    return replace(found, points=tuple(points), measured=scores[0].told, metric=scores[0].metric)


def _outputs(key: str, values: Sequence[float | str], measuring: Measuring) -> Sweep:
    """Points of what no plan says, or of samples of their own: what was written."""
    from ckpt_prune.model.spaces import first_expert_spaces
    from ckpt_prune.runner.messages import cache_line
    from ckpt_prune.runner.sweep import point_of_output

    measuring.foresee(values)
    points = []
    for value, (pruned, own) in zip(values, measuring.each(key, values), strict=True):
        assert pruned.settled is not None
        assert pruned.report is not None
        points.append(_scored(point_of_output(value, pruned.settled, pruned.report), own))
        settled, scores = pruned.settled, own
    recipe = settled.recipe
    spaces = tuple(first_expert_spaces(recipe.spaces))
    notes = tuple(filter(None, [cache_line(settled)]))
    return Sweep(recipe.name, spaces, settled.before, tuple(points), key, scores.told, scores.metric, notes)


def _scored(point: "Point", scores: Scores) -> "Point":
    return replace(point, score=scores.score, measured=scores.kl)
