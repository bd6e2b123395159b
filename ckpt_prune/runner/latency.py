"""Sizes in time: a table of this machine before a prune, and a measurement of its output afterwards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.common.progress import Notices
from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import begin
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.publish import replace_record
from ckpt_prune.stages.folders import stages_of
from ckpt_prune.stages.report import Report


def with_latencies(job: Job, say: Notices) -> Job:
    """Return the job with this machine's table of latencies, if the recipe's size is a latency."""
    size = job.recipe.size
    if size is None or size.kind != "latency" or job.plan is not None:
        return job
    from ckpt_prune.benchmarking.latency_table import HalfStream, choose_timed_workload, load_or_measure_table

    start = begin(job)
    halves = [halved for stage in stages_of(job.recipe) if (halved := stage.halve(start)) is not None]
    half = HalfStream(*halves[0]) if halves else None

    def measure() -> Any:
        workload = choose_timed_workload(job.model.checkpoint.path, size.timed, trust=job.trust)
        return load_or_measure_table(
            job.model, list(job.recipe.at(job.model.family).spaces), workload, job.device, half
        )

    table = process_group().once(measure)
    say(table.line)
    return replace(job, latencies=table.latencies)


def time_output(report: Report, job: Job, out: Path, say: Notices) -> Report:
    """Time an output whose size was a time, if both models are small enough, and return its report with the times.

    The output is in its place by then, so nothing is lost if it cannot be timed. Its report and card, which no digest
    covers, are replaced as a whole.
    """
    size, latency = job.recipe.size, report.latency
    if size is None or latency is None or latency.measured is not None:
        return report
    from ckpt_prune.benchmarking.latency_table import CHECKED_BYTES, choose_timed_workload, time_fastest
    from ckpt_prune.benchmarking.runners import TorchTimer
    from ckpt_prune.evaluation.whole_model import load_model

    if 4 * report.before.parameters > CHECKED_BYTES:
        return report

    def measure() -> Report:
        device, folder = job.device, job.model.checkpoint.path
        how: dict[str, Any] = {"device": device, "dtype": torch.float32, "trust_remote_code": job.trust}
        timers = [TorchTimer(load_model(each, **how), device) for each in (folder, out)]
        workload = choose_timed_workload(folder, size.timed, trust=job.trust)
        dense, ours = time_fastest(timers, workload, "timing the output")
        timed = latency.model_copy(update={"measured_dense": dense / 1e6, "measured": ours / 1e6})
        timed_report = report.model_copy(update={"latency": timed})
        replace_record(out, timed_report)
        return timed_report

    try:
        return process_group().once(measure)
    except BaseException:
        say(f"{out} is complete, but was not timed: the same command with --resume tries again")
        raise
