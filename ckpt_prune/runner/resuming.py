"""Say that interrupted work can be continued."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.common.errors import DiskError, UserError

NOTHING_BEGUN = "nothing to resume: starting afresh"
"""Line of a run that is to be resumed and was not begun."""


@contextmanager
def resumable(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say after Ctrl-C, SIGTERM, SIGHUP, a crash or a full disk that the work so far is kept, if it is."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        bad_input = isinstance(error, UserError) and not isinstance(error, DiskError)
        partial = out.with_name(f"{out.name}.partial")
        if not bad_input and partial.exists():
            what = "keeps what is done: the same command with --resume continues"
            if not _has_finished_work(partial):
                what = "holds nothing that is done yet: the same command with --resume starts afresh"
            say(f"{out}.partial {what}")
        raise


def _has_finished_work(partial: Path) -> bool:
    try:
        journal = Journal.read(partial)
    except ValueError:  # a kill before its first journal
        return False
    return bool(journal.entries) or journal.complete
