"""Entering the staging folder of a run: begin, continue, or find that an earlier run has done everything."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.digests import find_changed_files
from ckpt_prune.checkpoint.folder_kinds import WantedNames
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import Staging, complete_swap, partial_of, refuse_overlap
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.afterwork import Afterwork
from ckpt_prune.job.form import Form
from ckpt_prune.job.job import Job
from ckpt_prune.job.run import Announce, Run, say_changed
from ckpt_prune.job.timing import PhaseTimer
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.follow import unfinished_afterwork
from ckpt_prune.runner.publish import form_of, publish_complete, wanted_names
from ckpt_prune.runner.resuming import NOTHING_BEGUN


@contextmanager
def open_run(
    job: Job,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    announce: Announce,
    afterwork: Sequence[Afterwork],
) -> Iterator[Run]:
    """Enter the staging folder of a job's run. `afterwork` is as in `Run`."""
    doing = next((keys.doing for keys in reversed(job.recipe.stages) if keys.prunes), "")
    opening = OutputFacts(
        form_of(job.recipe),
        job.digest,
        job.part_digests,
        [model.checkpoint for model in (job.model, job.dense) if model is not None],
        lambda: wanted_names(job.model.checkpoint, job.recipe),
        lambda journal: summary(journal, job.model.blocks, doing),
    )
    run = Run(out, None, PhaseTimer(job.device), announce, afterwork=afterwork)
    with open_staging(opening, run, resume=resume, overwrite=overwrite):
        yield run


@dataclass(frozen=True)
class OutputFacts:
    """The facts about an output that are known before it is begun.

    Attributes:
        digest: of everything that it depends on.
        parts: name of each part of that → its digest.
        sources: checkpoints that it is made from. Values that are not finite are refused.
        wanted: returns the names that it will have, as far as they are known.
        summary: says what is done, by the journal of an interrupted run.
    """

    form: Form
    digest: str
    parts: Mapping[str, str]
    sources: Sequence[Checkpoint]
    wanted: Callable[[], WantedNames]
    summary: Callable[[Journal], str]


@contextmanager
def open_staging(opening: OutputFacts, run: Run, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Enter the staging folder of a run, or set `run.report` if an earlier run has done everything.

    In several processes, the first one writes.
    """
    group, form, out, announce = process_group(), opening.form, run.out, run.announce
    for source in opening.sources:
        refuse_overlap(source.path, out)
    run.sources = opening.sources
    run.report = group.once(lambda: _find_finished(opening, run) if resume and not overwrite else None)
    if run.report is not None:
        yield
        return

    def begin() -> Staging:
        wants = opening.wanted()
        staging = Staging(
            out,
            job=opening.digest,
            parts=opening.parts,
            resume=resume,
            overwrite=overwrite,
            kind=form.kind,
            wants=wants,
        )
        if staging.journal.is_written and _is_changed(staging, form):
            announce(f"{out}.partial was changed: the changed parts are done again")
            staging.reopen()
        if staging.changed is not None:
            announce(say_changed(out, staging.changed))
        if not staging.resumed:
            staging.journal.sources = [source.identify() for source in opening.sources]
        for source, identity in zip(opening.sources, staging.journal.sources, strict=True):
            if staging.resumed and not source.is_identified(identity):
                raise UserError(
                    f"{source.path} has other weights than when {out}.partial was begun; put those back, or start "
                    "afresh with --overwrite"
                )
        if resume and not staging.resumed:
            announce(NOTHING_BEGUN)
        elif resume:
            announce(f"resuming {out}.partial: {opening.summary(staging.journal)}")
        return staging

    staging = run.staging = group.on_first(begin)
    with nullcontext() if staging is None else staging:
        run.report = group.once(
            lambda: publish_complete(staging, form, run) if staging and staging.journal.is_written else None
        )
        yield


def _is_changed(staging: Staging, form: Form) -> bool:
    """Return whether files of a complete output are not those that its record names."""
    try:
        record = form.read(staging.path)
    except UserError:
        return True
    return record is None or find_changed_files(staging.path, record.files) != (None, [])


def _find_finished(opening: OutputFacts, run: Run) -> Any:
    """Return the record of an output that this very job has finished, or None. Finish its swap."""
    if partial_of(run.out).exists():
        return None
    try:
        record = opening.form.read(run.out)
    except UserError:
        return None  # It is damaged: a run that wants to replace it says so.
    if record is None or record.job != opening.digest:
        return None
    complete_swap(run.out, opening.form.kind)
    lacking = " and ".join(work.noun for work in unfinished_afterwork(run))
    state = f"complete: only its {lacking} is missing" if lacking else "finished: nothing is left to do"
    run.announce(f"{run.out} is {state}")
    return record


def summary(journal: Journal, blocks: int, done: str) -> str:
    """Return what a journal says is done, in the words of its entries. `done` is what was done to written blocks."""
    if journal.complete:
        return "all done but putting it in its place"
    if journal.is_written:
        return "all done but what is exported of it"
    # A numbered entry is of one block, or of one model that was tried.
    counts = Counter(entry.rpartition(" ")[0] for entry in journal.entries if entry.rpartition(" ")[2].isdigit())
    phases = [entry for entry in journal.entries if not entry.rpartition(" ")[2].isdigit()]
    written = counts.pop("block", 0)
    parts = [f"{name} ({count})" for name, count in counts.items() if name not in phases]
    return ", ".join([*phases, *parts, *([f"{written} of {blocks} blocks {done}"] if written else [])])
