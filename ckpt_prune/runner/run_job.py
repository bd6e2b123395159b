"""The story of a job: check it, preview it, run its stages, walk over the blocks, publish."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.job.afterwork import Afterwork, Followed
from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import Prepared, begin
from ckpt_prune.job.run import Announce, Run, say_nothing
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.checks import check_data, check_fit, check_together, check_training
from ckpt_prune.runner.follow import afterwork_of, follow_in_place
from ckpt_prune.runner.open_run import open_run
from ckpt_prune.runner.publish import publish
from ckpt_prune.stages.folders import stages_of
from ckpt_prune.stages.shared.output import plan_output
from ckpt_prune.stages.shared.walk import Records, read_records, walk


@dataclass(frozen=True)
class Done:
    """The results of a run.

    Attributes:
        prepared: the job with everything that was decided while it ran.
        report: the record that the output carries; of a prune, that of ckpt_prune.json.
        followed: what came of the work that follows the output.
        finished: True if an earlier run had done all of it; `prepared` then lacks what that run measured and decided.
    """

    prepared: Prepared
    report: Any
    followed: Sequence[Followed] = ()
    finished: bool = False


def check_job(job: Job, *, needs_data: bool = True) -> Prepared:
    """Refuse a job that cannot work, before any data is read. Return the state in which it starts.

    Data is checked too, except in a dry run (`needs_data` is False) that was given none.
    """
    start = begin(job)
    check_fit(start)
    if needs_data or not start.lacks_moments:
        check_data(start)
    return start


def preview_job(job: Job, start: Prepared | None = None) -> Prepared:
    """Plan the output before anything is measured. What measuring will decide gets a placeholder.

    `start` is what `check_job` has returned; by default the job is checked here.
    """
    prepared = start or check_job(job, needs_data=False)
    for stage in stages_of(prepared.recipe):
        prepared = stage.preview(prepared)
    return plan_output(prepared)


def run_job(
    job: Job,
    out: Path,
    *,
    start: Prepared | None = None,
    resume: bool = False,
    overwrite: bool = False,
    announce: Announce = say_nothing,
    afterwork: Sequence[Afterwork] | None = None,
) -> Done:
    """Run a job, or continue it, into a folder that stock transformers loads.

    The output is written to `OUT.partial` and renamed at the end. A resumed run gives the same bytes as one
    that was not interrupted. Bad input leaves nothing behind.

    Args:
        start: the state that `check_job` returned, or the later one of `preview_job` if that knows all widths. By
            default the job is checked here.
        resume: continue an interrupted run of the same job.
        overwrite: replace an existing output, or start an interrupted run afresh.
        afterwork: what follows the output; by default what its stages say (`afterwork_of`).
    """
    # 1. Refuse what cannot work, before anything is measured.
    start = start or check_job(job)
    check_training(start)
    check_together(job)
    afterwork = afterwork_of(job) if afterwork is None else afterwork

    # 2. Enter the staging folder with its journal.
    with open_run(job, out, resume=resume, overwrite=overwrite, announce=announce, afterwork=afterwork) as run:
        if run.report is not None:
            process_group().on_first(lambda: follow_in_place(run))
            return Done(start, run.report, process_group().once(lambda: run.followed), finished=True)

        # 3. Stages that work on the model as a whole do it now. Each returns a new state.
        prepared = start
        for stage in stages_of(start.recipe):
            prepared = stage.run(prepared, run)
            if stage.keys.changes_model:
                check_fit(prepared)
        # All processes have the same measurements, so each decides alone, and must come to the same widths.
        prepared = plan_output(prepared)
        process_group().agree({"choice of widths": prepared.widths})

        # 4. Every file, name, dtype and shape of the output is known before the first tensor is made.
        run.open_store(prepared)
        for stage in stages_of(prepared.recipe):
            prepared = stage.before_blocks(prepared, run)

        # 5. Stages that work on single blocks act in turn on each. A block that is done is on disk.
        records = write_blocks(prepared, run)
        for stage in stages_of(prepared.recipe):
            stage.after_blocks(prepared, run)

        # 6. Config, report, card and what follows them; then the folder takes its place, whole or not at all.
        report = process_group().once(lambda: publish(prepared, records, run))
        return Done(prepared, report, process_group().once(lambda: run.followed))


def write_blocks(prepared: Prepared, run: Run) -> Records:
    """Take every block through the steps of the stages, and write what stands outside the blocks."""
    store, stages = run.store, stages_of(prepared.recipe)
    assert store is not None
    with run.timer.time("blocks"):
        for stage in stages:
            step = stage.step(prepared, run)
            if step is not None:
                run.steps[stage.keys.key] = step
        if process_group().once(lambda: any(stage.rewrites_blocks(run) for stage in stages)):
            # All blocks are written, and a later stage has begun to rewrite them: only their records are still needed.
            records = read_records(prepared.model, run.steps, store)
        else:
            records = walk(prepared.view, run.steps, store, doing=stages[0].keys.bar if stages else "pruning")
    run.write_rest(prepared.view)
    return records
