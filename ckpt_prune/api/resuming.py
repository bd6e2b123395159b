"""What is said where work is interrupted that can be gone on with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_prune.errors import DiskError, UserError


@contextmanager
def resumable(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say on Ctrl-C, SIGTERM and SIGHUP, after a crash or on a full disk that the work so far is kept, where it is."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        bad_input = isinstance(error, UserError) and not isinstance(error, DiskError)
        if not bad_input and out.with_name(f"{out.name}.partial").exists():
            say(f"{out}.partial keeps what is done: the same command with --resume continues")
        raise
