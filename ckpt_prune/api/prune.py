"""`ckpt_prune.prune`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.function import takes
from ckpt_prune.api.latency import time_output, with_latencies
from ckpt_prune.api.push import Pushed
from ckpt_prune.api.push import push as push_output
from ckpt_prune.api.quality import check_quality, count_windows, is_measured, measure_quality
from ckpt_prune.checkpoint.staging import check_output
from ckpt_prune.common.errors import DiskError, UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.measure.statistics.files import check_statistics
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.options.data import has_data
from ckpt_prune.parallel.group import ALONE, process_group, working_in
from ckpt_prune.recipe.places import check_recipe
from ckpt_prune.recipe.sizes import asked_size, small_share_line
from ckpt_prune.runner.resuming import resumable

if TYPE_CHECKING:
    from ckpt_prune.evaluation.results import Result
    from ckpt_prune.gguf.export import ExportedGguf, GgufStep
    from ckpt_prune.job.job import Job
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.model.model import Model
    from ckpt_prune.onnx.export import Exported, GraphStep
    from ckpt_prune.runner.estimate import Estimate
    from ckpt_prune.runner.read_recipe import ChosenRecipe
    from ckpt_prune.stages.report import Report


@dataclass(frozen=True)
class Pruned:
    """The output of a prune.

    Attributes:
        settled: the job with all that was decided; None if an earlier run had done everything but the graph.
        report: as in the output's ckpt_prune.json; None after a dry run.
        graph: the ONNX graph or GGUF file of a recipe with `export`.
        evaluation: what was measured of it beside the dense model, as `cp.evaluate` returns it; None if nothing was.
        estimate: of time, memory and disk, after a dry run.
    """

    path: Path
    settled: "Prepared | None"
    report: "Report | None"
    graph: "Exported | ExportedGguf | None" = None
    notices: tuple[str, ...] = ()
    evaluation: "Result | None" = None
    pushed: "Pushed | None" = None
    estimate: "Estimate | None" = None

    def __repr__(self) -> str:
        job = self.settled if self.report is None else None
        shown = {"settled": job, "report": self.report, "graph": self.graph, "pushed": self.pushed}
        return short_repr(self, path=str(self.path), **shown)

    @property
    def passed(self) -> bool:
        """True if there is no graph, or it computes what the model does."""
        return self.graph is None or self.graph.passed

    @property
    def fewer_bits(self) -> str | None:
        """A line with the command that makes a model no larger by fewer bits, which loses less; None without one."""
        if self.settled is None:
            return None
        from ckpt_prune.runner.fewer_bits import fewer_bits_line

        return fewer_bits_line(self.settled)

    def data(self) -> dict[str, Any]:
        if self.report is None:
            return _dry_data(self.settled, self.estimate) | {"fewer_bits": self.fewer_bits}
        data = self.report.data() | {"fewer_bits": self.fewer_bits}
        if self.settled is not None:
            from ckpt_prune.runner.messages import messages

            data["messages"] = messages(self.settled)
        if self.graph is not None:
            data[self.graph.format] = self.graph.data()
        if self.evaluation is not None:
            data["evaluation"] = self.evaluation.data()
        return data if self.pushed is None else data | {"pushed": self.pushed.data()}


class AfterwardsError(UserError):
    """The output, `pruned`, is complete, but what was to be done with it afterwards failed."""

    def __init__(self, message: str, pruned: Pruned) -> None:
        super().__init__(message)
        self.pruned = pruned


class GraphFailedError(AfterwardsError):
    """The output's graph cannot be made."""


class EvaluationFailedError(AfterwardsError):
    """The output cannot be measured."""


class PushFailedError(AfterwardsError):
    """The output cannot be pushed."""


@takes(PruneOptions)
def prune(options: PruneOptions) -> Pruned:
    """Write a pruned and compensated copy of MODEL that transformers loads.

    A recipe either drops units of spaces, so that the model becomes smaller, or has a mask, which zeroes single weights
    and leaves every shape as it is.

    The default recipe, best-uniform, sets nothing by hand: units, widths, strength and form of compensation are those
    that do the least harm as measured, with the same widths in every block. Recipe best does the same with widths per
    block: it loses less, and OUT then carries its own code to load it with.

    What layers read is known from --statistics or measured on --text, or on --images for a vision model. A sequential
    recipe measures each block behind the already pruned ones, as its paper does; a dense recipe measures the unpruned
    model first. A recipe that looks at weights alone (magnitude) needs neither.

    If a recipe has `recovery`, what stays is trained as `ckpt-prune recover` does it. Each block is trained right after
    it is pruned (for any recipe with --set recovery.epochs=10), or scales of all blocks at the end (--set
    recovery.method=scales). If it has `export` (--set export.format=onnx), OUT/onnx is its graph, or with
    export.format=gguf OUT/model-TYPE.gguf a file for llama.cpp, compared with PyTorch as `ckpt-prune export` does it.
    The exit code is 1 if the graph or file computes something else, and 2 if it cannot be made; OUT is complete without
    it either way. A run that is stopped while it exports leaves OUT.partial.

    A long run starts with an estimate of time, memory and disk; --dry-run always prints one. The output appears only
    when it is complete. An interrupted run leaves OUT.partial, which --resume continues.

    Raises `GraphFailedError`, `EvaluationFailedError` or `PushFailedError`, which are UserErrors, if the output is
    written but its graph cannot be made, or it cannot be measured or pushed.
    """
    return prune_as(options)


Tell = Callable[[Pruned, str], None]


def prune_as(options: PruneOptions, tell: Tell = lambda _pruned, _following: None) -> Pruned:
    """Prune, and call `tell` whenever something is complete: with the output, and the key of what follows, if any.

    That is the key of `Pruned.data`: onnx, gguf, evaluation or pushed.
    """
    pruned, job = _prune(options, tell)
    # An earlier run that did everything has measured too, unless it ended before.
    has_loss = pruned.report is not None and pruned.report.loss is not None
    if job is not None and is_measured(options) and (options.evaluate or not has_loss):
        tell(pruned, "evaluation")
        pruned = process_group().alone(lambda: _evaluate(options, pruned, job))
    if options.push is None or options.dry_run or not pruned.passed:
        return pruned
    tell(pruned, "pushed")
    send = partial(push_output, pruned, options.push, public=options.public, progress=options.progress)
    try:
        return replace(pruned, pushed=process_group().alone(send))
    except UserError as error:
        again = f"`ckpt-prune push {pruned.path} {options.push}`"
        raise PushFailedError(f"{error}; {pruned.path} is complete: {again}", pruned) from error


def _prune(options: PruneOptions, tell: Tell) -> "tuple[Pruned, Job | None]":
    """Prune; return the output and the job that made it, None after a dry run."""
    out = options.output
    # Refuse what can be refused before torch is imported.
    _check_together(options)
    if options.recipe is not None:
        check_recipe(options.recipe)
    if Path(options.model).is_dir() and options.has_output:
        model, replaced = Path(options.model), options.may_replace
        process_group().on_first(lambda: check_output(model, out, resume=options.resume, overwrite=replaced))
    check_supported(options.model, options.family, options.part)
    check_texts(options.text)
    check_quality(options, options.model)
    if options.statistics is not None:
        check_statistics(options.statistics)
    if options.push is not None:
        process_group().on_first(partial(_check_pushed, options.push, options))

    # Refuse what can be refused before transformers is imported.
    from ckpt_prune.runner.read_recipe import read_recipe

    chosen = read_recipe(options)

    from ckpt_prune.model.containers.opening import Opening, open_model
    from ckpt_prune.runner.checks import check_training
    from ckpt_prune.runner.messages import extreme_line
    from ckpt_prune.runner.read_job import read_job
    from ckpt_prune.runner.run_job import check_job, preview_job, run_job
    from ckpt_prune.runner.runtimes import check_stored, fit_to_runtimes

    say = Notices()
    # What is only told, and of sizes alone, does without transformers' class, which takes seconds to import.
    told = options.dry_run and not chosen.recipe.needs_moments and chosen.plan is None and not has_data(options)
    dense = open_model(options.model, Opening.of(options, by_class=not told))
    chosen = replace(chosen, recipe=fit_to_runtimes(chosen.recipe, dense, say))
    if options.resume and not options.overwrite and not options.dry_run:
        finished = process_group().alone(lambda: _missing_graph(options, chosen, dense, say, tell))
        if finished is not None:
            return finished, read_job(options, chosen, dense, say) if is_measured(options) else None
    job = with_latencies(read_job(options, chosen, dense, say), say, trust=options.trust_remote_code)
    start = check_job(job, needs_data=not options.dry_run)
    preview = preview_job(job, start)
    settled = preview if options.dry_run or start.widths_known else start
    if settled is preview:
        check_stored(preview)
    check_training(start)
    step = _graph_step(options, chosen, dense)
    if options.dry_run or settled.measures_first or settled is not preview:
        _check_before_measuring(preview, step, out)
    if job.samples is not None:
        from ckpt_prune.verification.forward_pass import check_forward

        check_forward(job.model, job.samples, say)
    for line in filter(None, (small_share_line(options.sizes), extreme_line(preview))):
        say(line)
    if options.dry_run:
        return Pruned(out, settled, None, None, tuple(say.lines), estimate=_estimate(options, preview, step)), None
    if not options.resume:
        warning = process_group().alone(lambda: _estimate(options, preview, step).warning)
        if warning is not None:
            say(warning)
    exports = None if step is None else _Exports(step, out)
    with resumable(out, say):
        done = run_job(
            job,
            out,
            start=settled,
            resume=options.resume,
            overwrite=options.overwrite,
            announce=say,
            export=None if exports is None else exports.write,
        )
    report = time_output(done.report, job, out, say, trust=options.trust_remote_code)
    pruned = Pruned(out, None if done.finished else done.prepared, report, None, tuple(say.lines))
    if exports is None:
        tell(pruned, "")
        return pruned, job
    # Of several processes, the first one has exported.
    graph, failure, is_done = process_group().once(lambda: (exports.graph, exports.failure, exports.is_done))
    tell(pruned, "" if is_done and graph is None else exports.step.recipe.format)
    if failure is not None:
        raise GraphFailedError(failure, replace(pruned, notices=_say_missing(exports.step, out, say)))
    if graph is None and not is_done:  # an earlier run has put the output in its place without it
        graph = process_group().alone(lambda: _graph(pruned, exports.step, say))
    return replace(pruned, graph=graph, notices=tuple(say.lines)), job


def _estimate(options: PruneOptions, preview: "Prepared", step: "GraphStep | GgufStep | None") -> "Estimate":
    """Return what pruning takes, with the file that is exported and the measuring that follows."""
    from ckpt_prune.evaluation.streamed import StreamedModel
    from ckpt_prune.runner.estimate import estimate_evaluation, estimate_job

    estimate, job = estimate_job(preview), preview.job
    if step is not None:
        size = step.bytes(preview.output.cost.parameters)
        estimate = replace(estimate, disk_bytes=estimate.disk_bytes + size, export_bytes=size)
    windows, files = count_windows(options, job)
    # A token takes a byte at the least.
    window = options.window or job.model.tokens
    windows = min(windows, sum(file.stat().st_size for file in files) // window)
    dense = StreamedModel.open(job.model.checkpoint.path, job.device, job.model.dtype) if windows else None
    return estimate if dense is None else estimate.followed_by(estimate_evaluation([dense, dense], windows, window))


class _Exports:
    """Exports an output as its recipe asks, while the output is still in its staging folder.

    Attributes:
        graph: what was exported; None if nothing was.
        failure: why nothing could be.
    """

    def __init__(self, step: "GraphStep | GgufStep", out: Path) -> None:
        self.step, self._out = step, out
        self.graph: Exported | ExportedGguf | None = None
        self.failure: str | None = None

    @property
    def is_done(self) -> bool:
        return self.step.recipe.is_done(self._out)

    def write(self, folder: Path) -> None:
        """Export what is in a staging folder. If that cannot be, the output takes its place without it."""
        try:
            with working_in(ALONE):
                graph = self.step.run(folder)
        except DiskError:
            raise
        except UserError as error:
            self.failure = str(error).replace(str(folder), str(self._out))
        else:
            self.graph = replace(graph, path=self._out / graph.path.name)


def _say_missing(step: "GraphStep | GgufStep", out: Path, say: Notices) -> tuple[str, ...]:
    what = "GGUF file" if step.recipe.format == "gguf" else "graph"
    say(f"{out} is complete without its {what}: `{step.command(out)}` writes it")
    return tuple(say.lines)


def _evaluate(options: PruneOptions, pruned: Pruned, job: "Job") -> Pruned:
    """Measure the output and the dense model on held-out data."""
    from ckpt_prune.stages.report import find_report

    say = Notices()
    try:
        results = measure_quality(pruned.path, job, options, say)
    except UserError as error:
        again = f"`ckpt-prune evaluate {pruned.path} --against {options.model}`"
        raise EvaluationFailedError(f"{error}; {pruned.path} is complete: {again}", pruned) from error
    report, notices = pruned.report and find_report(pruned.path), (*pruned.notices, *say.lines)
    return replace(pruned, evaluation=results[0] if results else None, report=report, notices=notices)


def _check_together(options: PruneOptions) -> None:
    has_data(options)
    if options.public and options.push is None:
        raise UserError("--public goes with --push")
    if options.recipe is not None and options.plan is not None:
        raise UserError("a plan has settled its recipe: give --recipe or --plan, not both")
    size = asked_size(options.sizes, options.ratio)
    changes = (options.ratio is not None, size, options.overrides, options.container, options.runs_on)
    if options.plan is not None and any((*changes, options.pattern, options.rotate)):
        raise UserError(
            "a plan has settled ratio and recipe: --ratio, --target-*, --pattern, --rotate, --set, --for and "
            "--container do not go with it"
        )


def _check_pushed(repo: str, options: PruneOptions) -> None:
    from ckpt_prune.hub.repository import find_repository

    place = find_repository(repo, public=options.public)
    if not place.empty:
        raise UserError(
            f"{place.repo} is on the Hub and not empty: choose another name, or prune and then `ckpt-prune push "
            f"{options.output} {place.repo} --overwrite`"
        )


def _graph_step(options: PruneOptions, chosen: "ChosenRecipe", model: "Model") -> "GraphStep | GgufStep | None":
    from ckpt_prune.stages.export.keys import Export

    export = chosen.recipe.get(Export)
    if export is None:
        return None
    if export.format == "gguf":
        from ckpt_prune.gguf import require_gguf

        require_gguf()
        from ckpt_prune.gguf.export import GgufStep
        from ckpt_prune.stages.quantize.keys import Quantize

        rounding = chosen.recipe.get(Quantize)
        rounded = rounding is not None and rounding.format == "int4"
        return GgufStep.of(export, model, options, rounded=rounded, trust=options.trust_remote_code)
    from ckpt_prune.onnx.export import GraphStep  # a second of imports

    return GraphStep.of(export, model.checkpoint, options, trust=options.trust_remote_code)


def _graph(pruned: Pruned, step: "GraphStep | GgufStep", say: Notices) -> "Exported | ExportedGguf":
    """Export what is in its place."""
    try:
        return step.run(pruned.path)
    except BaseException as error:
        notices = _say_missing(step, pruned.path, say)
        if not isinstance(error, UserError):
            raise
        raise GraphFailedError(str(error), replace(pruned, notices=notices)) from error


def _missing_graph(
    options: PruneOptions, chosen: "ChosenRecipe", model: "Model", say: Notices, tell: Tell
) -> Pruned | None:
    """Make the graph of an output that an interrupted run of this recipe on this model left before its export."""
    from ckpt_prune.stages.export.keys import Export
    from ckpt_prune.stages.report import find_report

    recipe, out = chosen.recipe, options.output
    export = recipe.get(Export)
    if export is None or export.is_done(out):
        return None
    report = find_report(out)
    if report is None:
        return None
    digest = report.recipe_digest if report.asked is None else report.asked.digest
    if digest != recipe.digest or report.source.fingerprint != model.checkpoint.fingerprint:
        return None
    what = "GGUF file" if export.format == "gguf" else "graph"
    say(f"{out} is complete: only its {what} is missing")
    step = _graph_step(options, chosen, model)
    assert step is not None
    pruned = Pruned(out, None, report)
    tell(pruned, export.format)
    return replace(pruned, graph=_graph(pruned, step, say), notices=tuple(say.lines))


def _check_before_measuring(preview: "Prepared", step: "GraphStep | GgufStep | None", out: Path) -> None:
    """Refuse what the run would only find after measuring, where a NaN would pass for an overflow."""
    from ckpt_prune.checkpoint.writer import check_free_space

    process_group().on_first(preview.model.checkpoint.check_finite)
    # What measuring decides can be smaller than its stand-in only if it also decides how many blocks go.
    if not (preview.foreseen and preview.job.recipe.joint):
        cost = preview.output.cost
        check_free_space(out.absolute().parent, cost.bytes + (step.bytes(cost.parameters) if step else 0))


def _dry_data(settled: "Prepared | None", estimate: "Estimate | None") -> dict[str, Any]:
    from ckpt_prune.runner.messages import messages, unmeasured_lines

    assert settled is not None
    assert estimate is not None
    stored = settled.output.container
    container = {"model_type": stored.model_type, "remote_code": stored.remote_class is not None}
    return {
        "recipe": settled.recipe.model_dump(mode="json", by_alias=True),
        "container": container if settled.container_known else None,
        "widths": [dict(width) for width in settled.widths],
        "widths_are_known": not settled.foreseen,
        "before": settled.before.model_dump(),
        "after": settled.output.cost.model_dump(),
        "messages": [*messages(settled), *unmeasured_lines(settled)],
        "estimate": estimate.data(),
    }
