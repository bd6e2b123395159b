"""What is said where work is interrupted that can be gone on with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.common.errors import DiskError, UserError


@contextmanager
def resumable(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say on Ctrl-C, SIGTERM and SIGHUP, after a crash or on a full disk that the work so far is kept, where it is."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        bad_input = isinstance(error, UserError) and not isinstance(error, DiskError)
        left = out.with_name(f"{out.name}.partial")
        if not bad_input and left.exists():
            what = "keeps what is done: the same command with --resume continues"
            if not _holds(left):
                what = "holds nothing that is done yet: the same command with --resume starts afresh"
            say(f"{out}.partial {what}")
        raise


def _holds(left: Path) -> bool:
    """Whether what an unfinished run left says that something of it is done."""
    try:
        journal = Journal.read(left)
    except ValueError:  # a kill before its first journal
        return False
    return bool(journal.entries) or journal.complete
