"""Sizes in time: the table of this machine for a request, and what an output takes beside what it was to take."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.common.progress import Notices

if TYPE_CHECKING:
    from ckpt_prune.job.job import Job
    from ckpt_prune.stages.report import Report


def with_latencies(job: "Job", say: Notices, *, trust: bool) -> "Job":
    """The request with the table of this machine, where its recipe's size is a latency.

    Args:
        job: as it was asked for.
        say: told what the table is.
        trust: run the checkpoint's own code for its config.

    Raises:
        UserError: the model cannot be timed so.
    """
    size = job.recipe.size
    if size is None or size.kind != "latency" or job.plan is not None:
        return job
    from ckpt_prune.benchmarking.latency_table import HalfStream, choose_timed_workload, load_or_measure_table
    from ckpt_prune.job.prepared import begin
    from ckpt_prune.parallel.group import process_group
    from ckpt_prune.stages.hidden.preview import half_stream

    half = HalfStream(*half_stream(begin(job))) if job.recipe.has("hidden") else None

    def measure() -> Any:
        workload = choose_timed_workload(job.model.checkpoint.path, size.timed, trust=trust)
        return load_or_measure_table(job.model, list(job.recipe.spaces), workload, job.device, half)

    table = process_group().once(measure)
    say(table.line)
    return replace(job, latencies=table.latencies)


def timed(report: "Report", job: "Job", out: Path, say: Notices, *, trust: bool) -> "Report":
    """The report of an output with what it takes, where its size was a time and both models are small enough.

    It is in its place by then, so that nothing is lost where it cannot be timed: its report says what was foreseen, and
    that and its card are replaced whole by such as say what was measured. No digest is of them.

    Args:
        report: of the output.
        job: as it was asked for.
        out: where the output is.
        say: told that the output is complete, where it is not timed to the end.
        trust: run the checkpoint's own code.

    Raises:
        UserError: it cannot be timed, or the report cannot be written.
    """
    size, latency = job.recipe.size, report.latency
    if size is None or latency is None or latency.measured is not None:
        return report
    import torch

    from ckpt_prune.benchmarking.latency_table import CHECKED_BYTES, choose_timed_workload, time_fastest
    from ckpt_prune.benchmarking.runners import TorchTimer
    from ckpt_prune.evaluation.whole_model import load_model
    from ckpt_prune.parallel.group import process_group
    from ckpt_prune.runner.publish import replace_record

    if 4 * report.before.parameters > CHECKED_BYTES:
        return report

    def measure() -> "Report":
        device, folder = job.device, job.model.checkpoint.path
        timers = [
            TorchTimer(load_model(each, device=device, dtype=torch.float32, trust_remote_code=trust), device)
            for each in (folder, out)
        ]
        dense, ours = time_fastest(timers, choose_timed_workload(folder, size.timed, trust=trust), "timing the output")
        found = latency.model_copy(update={"measured_dense": dense / 1e6, "measured": ours / 1e6})
        whole = report.model_copy(update={"latency": found})
        replace_record(out, whole)
        return whole

    try:
        return process_group().once(measure)
    except BaseException:
        say(f"{out} is complete, but was not timed: the same command with --resume tries again")
        raise
