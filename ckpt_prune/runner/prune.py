"""`prune`: from options to an output that is measured, exported and pushed.

Modules that load classes of models take seconds. They are imported where they are used: a dry run needs none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.checkpoint.disk_space import check_free_space
from ckpt_prune.common.errors import EvaluationFailedError, GraphFailedError, PushFailedError, UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.job.afterwork import Afterwork
from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.cost_record import WholeSizes
from ckpt_prune.options.commands import PruneOptions, PushOptions
from ckpt_prune.options.data import has_data
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.sizes import small_share_line
from ckpt_prune.runner.checks import check_pairs, check_training
from ckpt_prune.runner.estimate import Estimate, estimate_prune
from ckpt_prune.runner.fewer_bits import fewer_bits_line
from ckpt_prune.runner.file_target import choose_for_file, is_for_file, measure_file, note_file
from ckpt_prune.runner.follow import afterwork_of
from ckpt_prune.runner.latency import time_output, with_latencies
from ckpt_prune.runner.messages import extreme_line, messages, unmeasured_lines
from ckpt_prune.runner.quality import count_windows, is_measured, measure_quality
from ckpt_prune.runner.read_job import read_job, suit_default
from ckpt_prune.runner.read_recipe import ChosenRecipe
from ckpt_prune.runner.resuming import resumable
from ckpt_prune.runner.run_job import Done, check_job, preview_job, run_job
from ckpt_prune.runner.runtimes import check_stored, fit_to_runtimes
from ckpt_prune.runner.whole_size import whole_sizes
from ckpt_prune.stages.folders import stages_of
from ckpt_prune.stages.report import Report, find_report

if TYPE_CHECKING:
    from ckpt_prune.evaluation.results import Result
    from ckpt_prune.gguf.export import ExportedGguf
    from ckpt_prune.onnx.export import Exported
    from ckpt_prune.runner.push import Pushed


@dataclass(frozen=True)
class Pruned:
    """The output of a prune.

    Attributes:
        settled: the job with all that was decided; None if an earlier run had done everything but the graph.
        report: as in the output's ckpt_prune.json; None after a dry run.
        graph: the ONNX graph or GGUF file of a recipe with `export`.
        evaluation: what was measured of it beside the dense model, as `cp.evaluate` returns it; None if nothing was.
        goes_on: whether another part of the model is pruned next, in the same call, and the path goes.
        dense: the model it was made from, if that is not the one that was opened: a part was pruned before.
        first: what a dry run says of the part that is pruned before, if it is of several.
        estimate: of time, memory and disk, after a dry run.
    """

    path: Path
    settled: Prepared | None
    report: Report | None
    graph: "Exported | ExportedGguf | None" = None
    notices: tuple[str, ...] = ()
    evaluation: "Result | None" = None
    pushed: "Pushed | None" = None
    estimate: Estimate | None = None
    goes_on: bool = False
    dense: str | None = None
    first: "Pruned | None" = None

    def __repr__(self) -> str:
        job = self.settled if self.report is None else None
        shown = {"settled": job, "report": self.report, "graph": self.graph, "pushed": self.pushed}
        return short_repr(self, path=str(self.path), **shown)

    @property
    def passed(self) -> bool:
        """True if there is no graph, or it computes what the model does."""
        return self.graph is None or self.graph.passed

    @property
    def part(self) -> str:
        """The part that was pruned, "" if it is no part."""
        within = None if self.settled is None else self.settled.model.checkpoint.within
        return "" if within is None else within.part

    @property
    def whole(self) -> WholeSizes | None:
        """Sizes of the dense model and of the output, if several of its parts are pruned."""
        if self.report is not None:
            return self.report.whole
        first = [each.settled for each in self.all_first if each.settled is not None]
        if not first or self.settled is None:
            return None
        return whole_sizes(self.settled, (), [(each.before, each.output.cost) for each in first])

    @property
    def all_first(self) -> list["Pruned"]:
        """The parts that are pruned before this one, in order, as a dry run foresees them."""
        return [] if self.first is None else [*self.first.all_first, self.first]

    @property
    def fewer_bits(self) -> str | None:
        """A line with the command that makes a model no larger by fewer bits, which loses less; None without one."""
        return None if self.settled is None else fewer_bits_line(self.settled, is_planned=self.report is None)

    def data(self) -> dict[str, Any]:
        if self.report is None:
            first: dict[str, Any] = {each.part: each.data() for each in self.all_first}
            first |= {} if self.whole is None else {"whole": self.whole.model_dump()}
            return self._dry_data() | {"fewer_bits": self.fewer_bits} | first
        data: dict[str, Any] = self.report.data() | {"fewer_bits": self.fewer_bits}
        if self.settled is not None:
            data["messages"] = messages(self.settled)
        if self.graph is not None:
            data[self.graph.format] = self.graph.data()
        if self.evaluation is not None:
            data["evaluation"] = self.evaluation.data()
        return data if self.pushed is None else data | {"pushed": self.pushed.data()}

    def _dry_data(self) -> dict[str, Any]:
        settled, estimate = self.settled, self.estimate
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


Tell = Callable[[Pruned, str], None]
"""Told of whatever is complete: the output so far, and the key in `Pruned.data` of what follows, or ""."""


def foresee(options: PruneOptions, chosen: ChosenRecipe, *, last: bool) -> Prepared:
    """Refuse what cannot work for one of two parts, as far as that is known without data.

    The output with both is exported: `last` is true of the part that is pruned last.

    Returns what is decided without it.
    """
    job = _read(options, chosen, Notices(), goes_on=True)
    if last:
        afterwork_of(job)
    return preview_job(job, check_job(job, needs_data=False))


def check_needed_pairs(options: PruneOptions, chosen: ChosenRecipe) -> None:
    """Refuse rows or a lack of them before an encoder-decoder is opened (`check_pairs`)."""
    is_measured = options.statistics is not None or chosen.plan is not None or options.dry_run
    check_pairs(options, None if is_measured else chosen.recipe)


def find_dense_of_stack(options: PruneOptions) -> str | None:
    """Return the dense model of an encoder-decoder whose other stack was pruned in an earlier call, if it is there."""
    report = find_report(Path(options.model)) if options.part in ("encoder", "decoder") else None
    if report is None or report.part in (None, options.part):
        return None
    from ckpt_prune.verification.dense_source import find_dense_source

    source = find_dense_source(Path(options.model))
    return None if source is None or source.folder is None else str(source.folder)


def prune_model(
    options: PruneOptions,
    chosen: ChosenRecipe,
    tell: Tell | None = None,
    *,
    dense: str | None = None,
    goes_on: bool = False,
    foresees: bool = True,
) -> Pruned:
    """Prune a model (`ckpt_prune.prune`), by the recipe that options name.

    Args:
        dense: what the output is measured beside, if another part of the model that options name is pruned already.
        goes_on: whether another part is pruned next, in the same call.
        foresees: whether a line says what a long run takes. Commands that prune on the way have said what they take.
    """
    out, say, notify = options.output, Notices(), tell or (lambda _pruned, _following: None)

    if not goes_on:
        check_needed_pairs(options, chosen)

    # 1. Read model and data, and decide all that needs no measuring. What cannot work is refused.
    of_file = is_for_file(options)
    if of_file:
        options, chosen = choose_for_file(options, chosen, say)
    job = _read(options, chosen, say, goes_on=goes_on)
    start = check_job(job, needs_data=not options.dry_run)
    preview = preview_job(job, start)
    settled = preview if options.dry_run or start.widths_known else start
    check_training(start)
    afterwork = [] if goes_on else afterwork_of(job)
    _check_foreseen(options, preview, settled, afterwork)
    if job.samples is not None:
        from ckpt_prune.verification.forward_pass import check_forward

        check_forward(job.stored_model, job.samples, say)

    # 2. Say what is unusual, and what a long run takes. A dry run ends here.
    for line in filter(None, (small_share_line(options.sizes), extreme_line(preview))):
        say(line)
    if options.dry_run:
        estimate = estimate_prune(preview, afterwork, *count_windows(options, job))
        return Pruned(out, settled, None, notices=tuple(say.lines), estimate=estimate)
    if foresees and not options.resume:
        warning = process_group().alone(
            lambda: estimate_prune(preview, afterwork, *count_windows(options, job)).warning
        )
        if warning is not None:
            say(warning)

    # 3. Run the job. The output is in its place then, with what its recipe exports.
    with resumable(out, say):
        result = run_job(
            job,
            out,
            start=settled,
            resume=options.resume,
            overwrite=options.overwrite,
            announce=say,
            afterwork=afterwork,
        )
    report = time_output(result.report, job, out, say)
    made = next((each.result for each in result.followed if each.result is not None), None)
    if of_file and made is not None and made.passed:
        report = process_group().alone(lambda: note_file(made.path, job, report))
    pruned = Pruned(out, None if result.finished else result.prepared, report, dense=dense)
    pruned = _add_exported(pruned, result, say, notify)

    # 4. Measure it beside the dense model, and push it. An earlier run that did everything has measured, too.
    if is_measured(options, report.loss):
        notify(pruned, "evaluation")
        pruned = process_group().alone(lambda: _measure(options, pruned, job, of_file=of_file))
    if options.push is not None and pruned.passed:
        notify(pruned, "pushed")
        pruned = process_group().alone(lambda: _push(options, pruned))
    return pruned


def _read(options: PruneOptions, chosen: ChosenRecipe, say: Notices, *, goes_on: bool) -> Job:
    # What is only told, and of sizes alone, does without transformers' class, which takes seconds to import.
    only_sizes = options.dry_run and not chosen.recipe.needs_moments and chosen.plan is None and not has_data(options)
    dense = open_model(options.model, Opening.of(options, by_class=not only_sizes, goes_on=goes_on))
    if chosen.plan is None:
        recipe = suit_default(options, dense.family, chosen.recipe, options.mask_changes, options.vocabulary)
        chosen = chosen if recipe is chosen.recipe else replace(chosen, recipe=recipe, written=recipe)
    chosen = replace(chosen, recipe=fit_to_runtimes(chosen.recipe, dense, say))
    model, facts = dense, list[Any]()
    for stage in stages_of(chosen.recipe):
        opened = stage.open(model, chosen.recipe, options, say)
        if opened is not None:
            model, chosen = opened.model, replace(chosen, recipe=opened.recipe)
            facts.append(opened.fact)
    job = read_job(options, chosen, model, say)
    if facts:
        job = replace(job, source=dense, opened=tuple(facts))
    return with_latencies(job, say)


def _check_foreseen(
    options: PruneOptions, preview: Prepared, settled: Prepared, afterwork: Sequence[Afterwork]
) -> None:
    """Refuse what the run would only find after measuring, where a NaN would pass for an overflow."""
    if settled is preview:
        check_stored(preview)
    if not (options.dry_run or settled.measures_first or settled is not preview):
        return
    process_group().on_first(preview.model.checkpoint.check_finite)
    # What measuring decides can be smaller than its stand-in only if it also decides how many blocks go.
    if not (preview.foreseen and preview.job.recipe.joint):
        cost = preview.output.cost
        needed = cost.bytes + sum(work.bytes(cost.parameters) for work in afterwork)
        check_free_space(options.output.absolute().parent, needed)


def _add_exported(pruned: Pruned, done: Done, say: Notices, tell: Tell) -> Pruned:
    """Return the output with what its recipe exported. Raises GraphFailedError if that failed."""
    followed = next(iter(done.followed), None)
    failure = None if followed is None else followed.failure
    if followed is not None and failure is not None:
        tell(pruned, followed.key)
        say(followed.lacking)
        raise GraphFailedError(failure, replace(pruned, notices=tuple(say.lines)))
    pruned = replace(pruned, notices=tuple(say.lines))
    tell(pruned, "")
    return pruned if followed is None else replace(pruned, graph=followed.result)


def _measure(options: PruneOptions, pruned: Pruned, job: Job, *, of_file: bool) -> Pruned:
    """Measure the output, or its file if that is what a size was asked for, and the dense model on held-out data."""
    say = Notices()
    try:
        reference = pruned.dense or options.model
        if of_file and pruned.graph is not None:
            results = [measure_file(pruned.graph.path, job, options)]
        else:
            results = measure_quality(pruned.path, job, options, say, reference, whole=pruned.dense)
    except UserError as error:
        if not options.evaluate:  # as outputs of other commands: only data that was named has to be measured
            say(f"{pruned.path} was not measured: {error}")
            return replace(pruned, notices=(*pruned.notices, *say.lines))
        again = f"`ckpt-prune evaluate {pruned.path} --against {reference}`"
        raise EvaluationFailedError(f"{error}; {pruned.path} is complete: {again}", pruned) from error
    report, notices = find_report(pruned.path), (*pruned.notices, *say.lines)
    return replace(pruned, evaluation=results[0] if results else None, report=report, notices=notices)


def _push(options: PruneOptions, pruned: Pruned) -> Pruned:
    from ckpt_prune.runner.push import push_output

    repo = str(options.push)
    try:
        return replace(pruned, pushed=push_output(PushOptions(folder=pruned.path, repo=repo, public=options.public)))
    except UserError as error:
        again = f"`ckpt-prune push {pruned.path} {repo}`"
        raise PushFailedError(f"{error}; {pruned.path} is complete: {again}", pruned) from error
