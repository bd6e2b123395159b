"""What a command says where it is interrupted."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from ckpt_prune.errors import UserError


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Say on Ctrl-C, on SIGTERM and SIGHUP, or after a crash, that the work so far is kept, where it is."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if not isinstance(error, UserError) and out.with_name(f"{out.name}.partial").exists():
            with suppress(OSError):  # after SIGHUP the terminal may be gone
                click.echo(
                    f"{out}.partial keeps the blocks that are done: the same command with --resume continues", err=True
                )
        raise
