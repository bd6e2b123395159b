"""`recover`: a job of one stage, and the measuring of its output."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.staging import refuse_overlap
from ckpt_prune.common.progress import Notices
from ckpt_prune.evaluation.results import Result
from ckpt_prune.job.job import Job, RecoverySamples
from ckpt_prune.measure.samples.choose import choose_fresh_samples, choose_samples
from ckpt_prune.measure.samples.instructions import read_answers
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.options.commands import RecoverOptions
from ckpt_prune.options.option import digested_options, select_options
from ckpt_prune.options.training import LLM_PRUNER, LoraSettings, RecoverySettings, SnowsSettings
from ckpt_prune.parallel.devices import resolve_device
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.quality import is_measured, measure_quality
from ckpt_prune.runner.read_job import asked_after, check_job_output, state_memory, training_dtype
from ckpt_prune.runner.resuming import resumable
from ckpt_prune.runner.run_job import check_job, run_job
from ckpt_prune.stages.recovery.keys import recover_recipe
from ckpt_prune.stages.recovery.lora import classes_of, require_peft
from ckpt_prune.stages.recovery.reports import known_samples
from ckpt_prune.stages.report import Report, find_report
from ckpt_prune.stages.shared.pairs import check_same_reader

MOST_SAMPLES = 2048
"""Samples if no number is given, as in the paper, or all there are."""
FEW_SAMPLES = 32
"""The same for scales."""


@dataclass(frozen=True)
class Recovered:
    """The output of `recover`, the report in its ckpt_prune.json, and the notices of the run.

    `evaluation` is what was measured of it beside the dense model, as `cp.evaluate` returns it; None if nothing was.
    """

    path: Path
    report: Report
    notices: tuple[str, ...] = field(default=(), repr=False)
    evaluation: Result | None = field(default=None, repr=False)

    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.report.data()
        return data if self.evaluation is None else data | {"evaluation": self.evaluation.data()}


def recover_model(options: RecoverOptions) -> Recovered:
    """Train the weights that a pruned model has left (`ckpt_prune.recover`)."""
    out, say = options.output, Notices()
    job = _read(options, say)
    with resumable(out, say):
        report = run_job(job, out, resume=options.resume, overwrite=options.overwrite, announce=say).report
    recovered, reference = Recovered(out, report, tuple(say.lines)), options.dense or options.pruned
    if not is_measured(options, report.loss):
        return recovered
    results = process_group().alone(lambda: measure_quality(out, job, options, say, reference))
    return Recovered(out, find_report(out) or report, tuple(say.lines), results[0] if results else None)


def _read(options: RecoverOptions, say: Notices) -> Job:
    """Open the models, check them and the place of the output, and choose the samples."""
    settings, lora = select_options(options, RecoverySettings), select_options(options, LoraSettings)
    recipe = recover_recipe(settings, lora, options.seed, select_options(options, SnowsSettings))
    method, out, trust = recipe.recovery.method, options.output, options.trust_remote_code
    if method == "lora":
        require_peft()
    device = resolve_device(options.device)
    pruned, dense = open_model(options.pruned, Opening.of(options)), None
    if method != "lora":
        dense = open_model(str(options.dense), Opening.of(options))
        refuse_overlap(dense.checkpoint.path, out)
    stored = dense.dtype if dense is not None else pruned.dtype
    dtype = training_dtype(options, device, method, stored)
    check_job_output(options, pruned, recipe, overwrite=options.overwrite)
    job = Job(pruned, recipe, device=device, dense=dense, trust=trust, asked=digested_options(options))
    check_job(job)
    seen = classes = None
    used = known_samples(find_report(pruned.checkpoint.path))
    if method == "scales":
        assert dense is not None
        fresh = choose_fresh_samples(dense, options, used, trust=trust, most=FEW_SAMPLES, say=say)
        samples, seen = fresh.samples, fresh.seen
    elif options.data is not None:
        cutoff = options.window or LLM_PRUNER["window"]
        samples = read_answers(pruned, options.data, cutoff=cutoff, most=options.samples, seed=options.seed)
    else:
        samples = choose_samples(dense or pruned, options, trust=trust, most=MOST_SAMPLES, say=say)
    if dense is None:
        classes = classes_of(pruned, samples, options)
    else:
        check_same_reader(pruned, dense, options.text, trust=trust)
    after = asked_after(options.perplexity_after, pruned) if method in ("laco", "snows") else frozenset[int]()
    training = RecoverySamples(samples, dtype, state_memory(options), after, seen, classes)
    return replace(job, training=training, earlier=used or ())
