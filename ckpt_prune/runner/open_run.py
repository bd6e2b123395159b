"""Entering the staging folder of a run: begin, continue, or find that an earlier run has done everything."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import Staging, complete_swap, partial_of, refuse_overlap
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.form import Form
from ckpt_prune.job.job import Job
from ckpt_prune.job.run import Announce, Run
from ckpt_prune.job.timing import PhaseTimer
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.checks import stages_of
from ckpt_prune.runner.publish import form_of, publish_complete, wanted_names


@contextmanager
def open_run(job: Job, out: Path, *, resume: bool, overwrite: bool, announce: Announce) -> Iterator[Run]:
    """Enter the staging folder of a run. `Run.report` is set if an earlier run has done everything.

    In several processes, the first one writes. Sources with values that are not finite are refused.
    """
    group, form, digest = process_group(), form_of(job.recipe), job.digest
    sources = [model.checkpoint for model in (job.model, job.dense) if model is not None]
    for source in sources:
        refuse_overlap(source.path, out)
    report = group.once(lambda: _find_finished(out, digest, form, announce) if resume and not overwrite else None)
    if report is not None:
        yield Run(out, None, PhaseTimer(job.device), announce, report=report)
        return

    def begin() -> Staging:
        wants = wanted_names(job.model.checkpoint, job.recipe)
        staging = Staging(out, job=digest, resume=resume, overwrite=overwrite, kind=form.kind, wants=wants)
        if resume and not staging.resumed:
            announce("nothing to resume: starting afresh")
        elif resume:
            doing = next(stage.doing for stage in reversed(stages_of(job.recipe)) if stage.prunes)
            announce(f"resuming {out}.partial: {summary(staging.journal, job.model.blocks, doing)}")
        if not staging.resumed:
            for source in sources:
                source.check_finite()
        return staging

    staging = group.on_first(begin)
    with nullcontext() if staging is None else staging:
        run = Run(out, staging, PhaseTimer(job.device), announce)
        run.report = group.once(
            lambda: publish_complete(staging, form, announce) if staging and staging.journal.complete else None
        )
        yield run


def _find_finished(out: Path, digest: str, form: Form, announce: Announce) -> Any:
    """Return the record of an output that this very job has finished, or None. Finish its swap."""
    if partial_of(out).exists():
        return None
    try:
        record = form.read(out)
    except UserError:
        return None  # It is damaged: a run that wants to replace it says so.
    if record is None or record.job != digest:
        return None
    complete_swap(out)
    announce(f"{out} is finished: nothing is left to do")
    return record


def summary(journal: Journal, blocks: int, done: str) -> str:
    """Return what a journal says is done, in words. `done` is what was done to a block that is written."""
    if journal.complete:
        return "all done but putting it in its place"
    entries = journal.entries

    def counted(prefix: str) -> int:
        return sum(entry.rpartition(" ")[0] == prefix for entry in entries)

    parts = []
    if "statistics of the unpruned model" in entries:
        parts.append("unpruned model measured")
    for stage in ("statistics", "effects"):
        if stage in entries:
            parts.append(f"{stage} measured")
        elif counted(stage):
            parts.append(f"{stage} of {counted(stage)} of {blocks} blocks measured")
    if "depth" in entries:
        parts.append("blocks to drop chosen")
    elif counted("removal"):
        parts.append(f"{counted('removal')} blocks to drop chosen")
    for tried, chosen in (("depth tried", "depth"), ("dimensions tried", "hidden"), ("axes tried", "depth")):
        if counted(tried) and chosen not in entries:
            parts.append(f"{counted(tried)} models of the size tried")
    if "hidden" in entries:
        parts.append("dimensions to drop chosen")
    if "basis" in entries:
        parts.append("basis of the residual stream measured")
    elif counted("basis"):
        parts.append(f"bases of {counted('basis')} of {blocks} blocks measured")
    if "search" in entries:
        parts.append("lambda chosen")
    if "rotations" in entries or counted("rotation") == blocks:
        parts.append("rotations learned")
    elif counted("rotation"):
        parts.append(f"{counted('rotation')} of {blocks} rotations learned")
    if "adapters" in entries:
        parts.append("adapters trained")
    if counted("block"):
        parts.append(f"{counted('block')} of {blocks} blocks {done}")
    if "scales" in entries:
        parts.append(f"scales fitted, {counted('scaled')} of {blocks} blocks scaled")
    return ", ".join(parts)
