"""`ckpt_prune.prune`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.latency import timed, with_latencies
from ckpt_prune.api.push import Pushed
from ckpt_prune.api.push import push as push_output
from ckpt_prune.api.resuming import resumable
from ckpt_prune.api.types import AnyModel, AnyPath, Bos, Choose, ComputeDtype, Texts
from ckpt_prune.checkpoint.staging import check_output
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_FOLDER
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.job.sizes import asked_size
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.measure.statistics.files import check_statistics
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options import PartName, PruneOptions, checked, has_data
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.places import check_recipe

if TYPE_CHECKING:
    from ckpt_prune.api.plan import Planned
    from ckpt_prune.job.plan import Plan
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.job.report import Report
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.model.model import Model
    from ckpt_prune.onnx.step import GraphStep
    from ckpt_prune.onnx.writing import Exported
    from ckpt_prune.runner.read_recipe import ChosenRecipe


@dataclass(frozen=True)
class Pruned:
    """What became of a prune.

    Attributes:
        path: the output; where it was a dry run, the one that would be written.
        settled: the job with all that was decided; None where an earlier run had done all of it, but perhaps the graph.
        report: as in the output's ckpt_prune.json; None after a dry run.
        graph: the ONNX graph of a recipe with `export`, or None.
        notices: lines that were said while it ran.
        pushed: where it was pushed to, or None.
    """

    path: Path
    settled: "Prepared | None"
    report: "Report | None"
    graph: "Exported | None" = None
    notices: tuple[str, ...] = ()
    pushed: "Pushed | None" = None

    def __repr__(self) -> str:
        job = self.settled if self.report is None else None
        return short_repr(
            self,
            path=str(self.path),
            settled=job,
            report=self.report,
            graph=self.graph,
            pushed=self.pushed,
        )

    @property
    def passed(self) -> bool:
        """Whether the graph, if there is to be one, computes what the model does."""
        return self.graph is None or self.graph.passed

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        if self.report is None:
            return _dry_data(self.settled)
        data = self.report.data()
        if self.settled is not None:
            from ckpt_prune.runner.messages import messages

            data["messages"] = messages(self.settled)
        if self.graph is not None:
            data["onnx"] = self.graph.data()
        return data if self.pushed is None else data | {"pushed": self.pushed.data()}


class AfterwardsError(UserError):
    """The output is complete, and what was to be done with it cannot be.

    Args:
        message: why.
        pruned: the output.
    """

    def __init__(self, message: str, pruned: Pruned) -> None:
        super().__init__(message)
        self.pruned = pruned


class GraphFailedError(AfterwardsError):
    """Its graph cannot be made."""


class PushFailedError(AfterwardsError):
    """It cannot be pushed."""


def prune(
    model: AnyModel,
    *,
    output: AnyPath,
    recipe: AnyPath | None = None,
    plan: "AnyPath | Plan | Planned | None" = None,
    statistics: "AnyPath | Statistics | None" = None,
    text: Texts = (),
    images: AnyPath | None = None,
    labels: AnyPath | None = None,
    max_corrupt: float = 0.05,
    audio: AnyPath | None = None,
    samples: int | None = None,
    window: int | None = None,
    seed: int = 0,
    choose: Choose = "random",
    bos: Bos = "auto",
    compute_dtype: ComputeDtype = "auto",
    folds: int | None = None,
    ratio: float | str | None = None,
    target_params: str | None = None,
    target_bytes: str | None = None,
    target_flops: str | None = None,
    target_latency: str | None = None,
    overrides: Mapping[str, object] | Sequence[str] = (),
    container: str | None = None,
    dry_run: bool = False,
    resume: bool = False,
    diagnostics: bool = True,
    state_memory: float = 8.0,
    perplexity_after: str | Sequence[int] | None = None,
    push: str | None = None,
    public: bool = False,
    overwrite: bool = False,
    family: AnyPath | None = None,
    part: PartName | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Pruned:
    """Write a pruned and compensated copy of a model that transformers loads, as `ckpt-prune prune` does.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        output: the folder to write; it appears only when it is complete.
        recipe: a shipped recipe's name or a file; None for the default.
        plan: what `plan` gave, or a plan file, in place of a recipe.
        statistics: what `calibrate` gave, or its folder.
        text: files to measure a language model on, in place of statistics.
        images: folder of images to measure a vision model on.
        labels: CSV with a column file and perhaps split (calib).
        max_corrupt: share of the images that may fail to decode.
        audio: folder of audio to run an encoder of speech on.
        samples: windows, or images; None for 128 windows, or all images up to 4000.
        window: tokens per window; None for the model's context, at most 2048.
        seed: of the random choice of samples.
        choose: random samples, or the first ones.
        bos: begin-of-sequence token before the text.
        compute_dtype: in which blocks run; auto for bfloat16 where the model is stored in it and the device is faster
            in it, else float32.
        folds: runs of samples whose moments are kept apart.
        ratio: share of units to drop in every space, or of weights that a mask zeroes, such as 0.2 or "20%".
        target_params: parameters to come down to, a number such as "5.0B" or a share such as "70%".
        target_bytes: bytes of tensors, likewise, such as "9.5GiB".
        target_flops: FLOPs of one forward pass, likewise.
        target_latency: time on this machine as a table of its blocks foresees it, likewise, such as "12ms" or "70%@512"
            for reading 512 tokens, "70%@token" for a single one.
        overrides: changes of the recipe's keys, dotted: {"spaces.mlp.ratio": 0.4}.
        container: what the output is stored as.
        dry_run: check everything and write nothing.
        resume: continue an interrupted run of the same job.
        diagnostics: also record floors, rho2, spectra and held-out errors of every site.
        state_memory: GiB of hidden states that are kept in memory; more of them are memory-mapped beside the output.
        perplexity_after: numbers of blocks, or "all": perplexities with only the first so many blocks recovered.
        push: repository on the Hub that the output is pushed to, as `push` does it. It is looked at before any work.
        public: let all read what is pushed.
        overwrite: replace an existing output; never a repository.
        family: file of a description of the model's family, where this version has none.
        part: which part of a model that is made of several: text, vision or encoder.
        trust_remote_code: accept a model that asks for code of its own.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars and notices on stderr.

    Raises:
        GraphFailedError: the output is written, and the recipe's graph cannot be made of it.
        PushFailedError: the output is written, and cannot be pushed.
        UserError: bad input; nothing is left behind.
    """
    return prune_as(checked(PruneOptions, locals()), progress=progress)


def _unheard(_pruned: Pruned) -> None:
    """What is told of an output to nobody."""


def prune_as(options: PruneOptions, *, progress: bool = True, written: Callable[[Pruned], None] = _unheard) -> Pruned:
    """`prune`, for a caller who is to know of the output also where its graph is never finished.

    Args:
        options: as `prune` takes them.
        progress: show bars and notices on stderr.
        written: told the output as soon as it is complete, before its graph is begun.

    Raises:
        GraphFailedError: the output is written, and the recipe's graph cannot be made of it.
        PushFailedError: the output is written, and cannot be pushed.
        UserError: bad input; nothing is left behind.
    """
    pruned = _pruned(options, progress, written)
    if options.push is None or options.dry_run or not pruned.passed:
        return pruned
    try:
        pushed = process_group().alone(
            partial(push_output, pruned, options.push, public=options.public, progress=progress)
        )
        return replace(pruned, pushed=pushed)
    except UserError as error:
        again = f"`ckpt-prune push {pruned.path} {options.push}`"
        raise PushFailedError(f"{error}; {pruned.path} is complete: {again}", pruned) from error


def _pruned(options: PruneOptions, progress: bool, written: Callable[[Pruned], None]) -> Pruned:
    out = options.output
    # Before torch is imported, what can be told without it.
    _check_together(options)
    if options.recipe is not None:
        check_recipe(options.recipe)
    if Path(options.model).is_dir():
        model = Path(options.model)
        process_group().on_first(lambda: check_output(model, out, resume=options.resume, overwrite=options.overwrite))
    check_supported(options.model, options.family, options.part)
    check_texts(options.text)
    if options.statistics is not None:
        check_statistics(options.statistics)
    if options.push is not None:
        process_group().on_first(partial(_check_pushed, options.push, options))

    # Before transformers is, what can be told without it.
    from ckpt_prune.runner.read_recipe import read_recipe

    with show_progress(progress):
        chosen = read_recipe(options)

    from ckpt_prune.model.containers.opening import Opening, open_model
    from ckpt_prune.runner.checks import check_training
    from ckpt_prune.runner.estimate import estimate_job
    from ckpt_prune.runner.read_job import read_job
    from ckpt_prune.runner.run_job import check_job, preview_job, run_job
    from ckpt_prune.verification.forward_pass import check_forward

    with show_progress(progress):
        say = Notices()
        dense = open_model(options.model, Opening.of(options))
        if options.resume and not options.overwrite and not options.dry_run:
            finished = process_group().alone(lambda: _missing_graph(options, chosen, dense, say, written))
            if finished is not None:
                return finished
        job = with_latencies(read_job(options, chosen, dense, say), say, trust=options.trust_remote_code)
        start = check_job(job, needs_data=not options.dry_run)
        preview = preview_job(job, start) if options.dry_run or start.widths_known else None
        settled = preview or start
        check_training(start)
        step = _graph_step(options, chosen, dense)
        if options.dry_run or settled.measures_first:
            _check_before_measuring(settled, step, out)
        if job.samples is not None:
            check_forward(job.model, job.samples, say)
        if options.dry_run:
            return Pruned(out, settled, None, None, tuple(say.lines))
        if not options.resume:
            warning = process_group().alone(lambda: estimate_job(preview or preview_job(job, start)).warning)
            if warning is not None:
                say(warning)
        with resumable(out, say):
            done = run_job(job, out, start=settled, resume=options.resume, overwrite=options.overwrite, announce=say)
        report = timed(done.report, job, out, say, trust=options.trust_remote_code)
        pruned = Pruned(out, None if done.finished else done.prepared, report, None, tuple(say.lines))
        written(pruned)
        if step is None or process_group().once(lambda: done.finished and (out / GRAPH_FOLDER).exists()):
            return pruned
        graph = process_group().alone(lambda: _graph(pruned, step, say))
        return replace(pruned, graph=graph, notices=tuple(say.lines))


def _check_together(options: PruneOptions) -> None:
    """Refuse options that contradict each other, whatever the files say that they name."""
    has_data(options, options)
    if options.public and options.push is None:
        raise UserError("--public goes with --push")
    if options.recipe is not None and options.plan is not None:
        raise UserError("a plan has settled its recipe: give --recipe or --plan, not both")
    size = asked_size(options.sizes, options.ratio)
    if options.plan is not None and (options.ratio is not None or size or options.overrides or options.container):
        raise UserError(
            "a plan has settled ratio and recipe: --ratio, --target-*, --set and --container do not go with it"
        )


def _check_pushed(repo: str, options: PruneOptions) -> None:
    """Refuse what cannot be pushed to, before anything is computed."""
    from ckpt_prune.hub.repository import find_repository

    place = find_repository(repo, public=options.public)
    if not place.empty:
        raise UserError(
            f"{place.repo} is on the Hub and not empty: choose another name, or prune and then `ckpt-prune push "
            f"{options.output} {place.repo} --overwrite`"
        )


def _graph_step(options: PruneOptions, chosen: "ChosenRecipe", model: "Model") -> "GraphStep | None":
    from ckpt_prune.stages.export.stage import Export

    export = chosen.recipe.get(Export)
    if export is None:
        return None
    from ckpt_prune.onnx.step import GraphStep  # a second of imports

    return GraphStep.of(export, model.checkpoint, options, options, trust=options.trust_remote_code)


def _graph(pruned: Pruned, step: "GraphStep", say: Notices) -> "Exported":
    try:
        return step.run(pruned.path, say)
    except UserError as error:
        raise GraphFailedError(str(error), replace(pruned, notices=tuple(say.lines))) from error


def _missing_graph(
    options: PruneOptions, chosen: "ChosenRecipe", model: "Model", say: Notices, written: Callable[[Pruned], None]
) -> Pruned | None:
    """Make the graph of an output that an interrupted run of this recipe on this model left before its export."""
    from ckpt_prune.job.report_file import report_of

    recipe, out = chosen.recipe, options.output
    if not recipe.has("export") or (out / GRAPH_FOLDER).exists():
        return None
    report = report_of(out)
    if report is None:
        return None
    digest = report.recipe_digest if report.asked is None else report.asked.digest
    if digest != recipe.digest or report.source.fingerprint != model.checkpoint.fingerprint:
        return None
    say(f"{out} is complete: only its graph is missing")
    step = _graph_step(options, chosen, model)
    assert step is not None
    pruned = Pruned(out, None, report)
    written(pruned)
    return replace(pruned, graph=_graph(pruned, step, say), notices=tuple(say.lines))


def _check_before_measuring(settled: "Prepared", step: "GraphStep | None", out: Path) -> None:
    """What running would find after measuring: refused here, a NaN would otherwise pass for an overflow."""
    from ckpt_prune.checkpoint.writer import check_free_space

    process_group().on_first(settled.model.checkpoint.check_finite)
    if settled.planned is not None:
        cost = settled.output.cost
        check_free_space(out.absolute().parent, cost.bytes + (step.bytes(cost.parameters) if step else 0))


def _dry_data(settled: "Prepared | None") -> dict[str, Any]:
    from ckpt_prune.runner.estimate import estimate_job
    from ckpt_prune.runner.messages import messages, unmeasured_lines

    assert settled is not None
    return {
        "recipe": settled.recipe.model_dump(mode="json", by_alias=True),
        "container": {
            "model_type": settled.output.container.model_type,
            "remote_code": settled.output.container.remote_class is not None,
        }
        if settled.container_known
        else None,
        "widths": [dict(width) for width in settled.widths],
        "widths_are_known": not settled.foreseen,
        "before": settled.before.model_dump(),
        "after": settled.output.cost.model_dump(),
        "messages": [*messages(settled), *unmeasured_lines(settled)],
        "estimate": estimate_job(settled).data(),
    }
