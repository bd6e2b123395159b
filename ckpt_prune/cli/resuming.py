"""What a command says where it is interrupted."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from ckpt_prune.errors import DiskError, UserError


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Say on Ctrl-C, SIGTERM and SIGHUP, after a crash or on a full disk that the work so far is kept, where it is."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        bad_input = isinstance(error, UserError) and not isinstance(error, DiskError)
        if not bad_input and out.with_name(f"{out.name}.partial").exists():
            with suppress(OSError):  # after SIGHUP the terminal may be gone
                click.echo(f"{out}.partial keeps what is done: the same command with --resume continues", err=True)
        raise
