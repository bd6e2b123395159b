"""Afterwork: what stages do with a finished folder before it takes its place, or later if that is lacking."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_prune.common.errors import DiskError, UserError
from ckpt_prune.job.afterwork import Afterwork, Followed
from ckpt_prune.job.job import Job
from ckpt_prune.job.run import Run
from ckpt_prune.parallel.group import ALONE, working_in
from ckpt_prune.stages.folders import stages_of


def afterwork_of(job: Job) -> list[Afterwork]:
    """Return what follows the output of a job. UserError if something of it cannot be done."""
    follows = (stage.after_publish(job) for stage in stages_of(job.recipe))
    return [work for work in follows if work is not None]


def follow(run: Run) -> None:
    """Do what follows, in the staging folder. The output takes its place without what cannot be done."""
    if run.afterwork and run.staging is not None:
        run.staging.mark_written()
        run.followed = [_do(work, run.staging.path, run.out) for work in run.afterwork]


def follow_in_place(run: Run) -> None:
    """Do what an output that an earlier run has finished still lacks."""
    tried = {each.key for each in run.followed}
    lacking = [work for work in unfinished_afterwork(run) if work.key not in tried]
    try:
        run.followed += [_do(work, run.out, run.out) for work in lacking]
    except BaseException:
        for work in lacking:
            run.announce(_lacking(work, run.out))
        raise


def unfinished_afterwork(run: Run) -> Sequence[Afterwork]:
    return [work for work in run.afterwork if not work.is_done(run.out)]


def _do(work: Afterwork, folder: Path, out: Path) -> Followed:
    try:
        with working_in(ALONE):
            result = work.run(folder)
    except UserError as error:
        if isinstance(error, DiskError) and folder != out:  # the run is resumed with it
            raise
        return Followed(work.key, failure=str(error).replace(str(folder), str(out)), lacking=_lacking(work, out))
    return Followed(work.key, replace(result, path=out / result.path.name))


def _lacking(work: Afterwork, out: Path) -> str:
    return f"{out} is complete without its {work.noun}: `{work.command(out)}` writes it"
