"""What a resumed run goes on with, in a line, and what it need not begin."""

from pathlib import Path

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import Staging, complete_swap, partial_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.report import Report
from ckpt_prune.job.report_file import report_of
from ckpt_prune.job.run import Announce


def finished(out: Path, job: str, announce: Announce) -> Report | None:
    """The report of an output that this very job has finished; what a kill left of its swap is cleared up.

    Args:
        out: the output.
        job: digest of all that it depends on.
        announce: told that there is nothing to do.

    Raises:
        UserError: its user's files cannot be kept.
    """
    if partial_of(out).exists():
        return None
    try:
        report = report_of(out)
    except UserError:
        return None  # damaged: whoever wants to replace it is told so
    if report is None or report.job != job:
        return None
    complete_swap(out)
    announce(f"{out} is finished: nothing is left to do")
    return report


def announce_resumed(staging: Staging, out: Path, blocks: int, done: str, announce: Announce) -> None:
    """Say what a resumed run goes on with.

    Args:
        staging: before it is entered.
        out: the output, as it was given.
        blocks: of the model.
        done: what has been done to a block that is written.
        announce: told the line.
    """
    if not staging.resumed:
        announce("nothing to resume: starting afresh")
    else:
        announce(f"resuming {out}.partial: {summary(staging.journal, blocks, done)}")


def summary(journal: Journal, blocks: int, done: str) -> str:
    """What a journal says is done."""
    if journal.complete:
        return "all done but putting it in its place"
    units = journal.units

    def counted(prefix: str) -> int:
        return sum(unit.rpartition(" ")[0] == prefix for unit in units)

    parts = []
    if "statistics of the unpruned model" in units:
        parts.append("unpruned model measured")
    for stage in ("statistics", "effects"):
        if stage in units:
            parts.append(f"{stage} measured")
        elif counted(stage):
            parts.append(f"{stage} of {counted(stage)} of {blocks} blocks measured")
    if "depth" in units:
        parts.append("blocks to drop chosen")
    elif counted("removal"):
        parts.append(f"{counted('removal')} blocks to drop chosen")
    for tried, chosen in (("depth tried", "depth"), ("dimensions tried", "hidden"), ("axes tried", "depth")):
        if counted(tried) and chosen not in units:
            parts.append(f"{counted(tried)} models of the size tried")
    if "hidden" in units:
        parts.append("dimensions to drop chosen")
    if "basis" in units:
        parts.append("basis of the residual stream measured")
    elif counted("basis"):
        parts.append(f"bases of {counted('basis')} of {blocks} blocks measured")
    if "search" in units:
        parts.append("lambda chosen")
    if "rotations" in units or counted("rotation") == blocks:
        parts.append("rotations learned")
    elif counted("rotation"):
        parts.append(f"{counted('rotation')} of {blocks} rotations learned")
    if counted("block"):
        parts.append(f"{counted('block')} of {blocks} blocks {done}")
    if "scales" in units:
        parts.append(f"scales fitted, {counted('scaled')} of {blocks} blocks scaled")
    return ", ".join(parts)
