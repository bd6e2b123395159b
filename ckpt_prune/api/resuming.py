"""What is said where work is interrupted that can be gone on with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_prune.errors import UserError


@contextmanager
def resumable(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say on Ctrl-C, on SIGTERM and SIGHUP, or after a crash, that the work so far is kept, where it is."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if not isinstance(error, UserError) and out.with_name(f"{out.name}.partial").exists():
            say(f"{out}.partial keeps the blocks that are done: the same command with --resume continues")
        raise
