"""Entering the staging folder of a run: begin, continue, or find that an earlier run has done everything."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.folder_kinds import OUTPUT_KIND, FolderKind, WantedNames
from ckpt_prune.checkpoint.staging import Staging, refuse_overlap
from ckpt_prune.job.run import Announce, Run
from ckpt_prune.job.timing import Stages
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.publish import publish_complete
from ckpt_prune.runner.resuming import announce_resumed, finished


@contextmanager
def open_run(
    job: str,
    out: Path,
    sources: Sequence[Checkpoint],
    *,
    device: torch.device,
    wants: WantedNames,
    doing: str,
    blocks: int,
    resume: bool,
    overwrite: bool,
    announce: Announce,
    kind: FolderKind = OUTPUT_KIND,
) -> Iterator[Run]:
    """Enter the staging folder of a run. `Run.report` is set if an earlier run has done everything.

    In several processes, the first one writes.

    Args:
        job: digest of all that the output depends on.
        out: the folder to write.
        sources: that are read; `out` may not lie in one of them, and their values must be finite.
        device: where the run computes.
        wants: names that the output will have.
        doing: what is done to a block, as a participle.
        blocks: how many there are.
        resume: continue an interrupted run of the same job.
        overwrite: replace an existing output, or start an interrupted run afresh.
        announce: says a line to the user.
        kind: of the output.

    Raises:
        UserError: the place will not do, or a source holds values that are not finite.
    """
    group = process_group()
    for source in sources:
        refuse_overlap(source.path, out)
    report = group.once(lambda: finished(out, job, announce) if resume and not overwrite else None)
    if report is not None:
        yield Run(out, None, Stages(device), announce, report=report)
        return

    def begin() -> Staging:
        staging = Staging(out, job=job, resume=resume, overwrite=overwrite, kind=kind, wants=wants)
        if resume:
            announce_resumed(staging, out, blocks, doing, announce)
        if not staging.resumed:
            for source in sources:
                source.check_finite()
        return staging

    staging = group.on_first(begin)
    with nullcontext() if staging is None else staging:
        run = Run(out, staging, Stages(device), announce)
        run.report = group.once(
            lambda: publish_complete(staging, announce) if staging is not None and staging.journal.complete else None
        )
        yield run
