"""Turn every error of a command into one line on stderr and an exit code: 2 for bad input, 1 for a fault of ours.

With `--json` also print an object on stdout.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from ckpt_prune.cli.stopping import exit_code
from ckpt_prune.common.errors import OutputError, UserError, one_line, to_memory_error, to_user_error
from ckpt_prune.common.safe_text import escape_output, to_one_line

BAD_INPUT, FAULT = 2, 1
"""Exit codes."""
DEBUG = "CKPT_PRUNE_DEBUG"
"""Environment variable with which a fault has its traceback."""


@contextmanager
def guarded(arguments: Sequence[str]) -> Iterator[None]:
    """Run a command line. SystemExit with its exit code if anything goes wrong."""
    with interruptible():
        _open_streams()
        with escape_output(sys.stdout):
            try:
                yield
                sys.stdout.flush()
            except (SystemExit, KeyboardInterrupt, GeneratorExit):
                raise
            except click.exceptions.NoArgsIsHelpError as error:
                error.show()
                raise SystemExit(BAD_INPUT) from None
            except BaseException as error:  # a panic of a library in Rust is no Exception
                code, lines = _explain(error)
                if code == FAULT and os.environ.get(DEBUG):
                    raise
                if isinstance(error, OutputError):  # what is still held back would fail once more when Python ends
                    with suppress(OSError):
                        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                # What was printed before is an object already.
                used = getattr(sys.stdout, "used", False) or isinstance(error, OutputError)
                _tell(code, lines, as_json="--json" in arguments and not used)
                raise SystemExit(code) from error


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn a signal that asks to stop into one line and its exit code."""
    try:
        yield
    except KeyboardInterrupt as error:
        with suppress(OSError):  # after SIGHUP the terminal may be gone
            click.echo("Interrupted.", err=True)
        raise SystemExit(exit_code(error)) from None


def _open_streams() -> None:
    """Let streams that are closed lead nowhere: files that are opened would take their numbers."""
    if sys.stdout is not None and sys.stderr is not None:
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    nothing = Path(os.devnull).open("w")  # noqa: SIM115 - until the program ends
    closed, sys.stdout, sys.stderr = sys.stdout is None, sys.stdout or nothing, sys.stderr or nothing
    if closed:
        _tell(BAD_INPUT, ["standard output is closed: send it to a file, or to /dev/null"], as_json=False)
        raise SystemExit(BAD_INPUT)


def _explain(error: BaseException) -> tuple[int, list[str]]:
    """Return the exit code of an error, and what to say of it: an error, and perhaps a hint."""
    if isinstance(error, click.UsageError):
        hint = [] if error.ctx is None else [f"Help: {error.ctx.command_path} --help"]
        return BAD_INPUT, [" ".join(error.format_message().split()), *hint]
    if isinstance(error, click.ClickException):
        return BAD_INPUT, [error.format_message()]
    if isinstance(error, click.Abort):
        return FAULT, ["aborted"]
    if isinstance(error, OSError):
        error = to_user_error(error)
    if isinstance(error, UserError):
        return BAD_INPUT, [str(error)]
    if isinstance(error, Exception) and (memory_error := to_memory_error(error, dry_run=False)) is not None:
        return BAD_INPUT, [str(memory_error)]
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return BAD_INPUT, ["a path holds a null character, which no file has in its name; give another"]
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).parents[1]
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(here)]
    place = f" at {Path(ours[-1].filename).relative_to(here.parent)}:{ours[-1].lineno}" if ours else ""
    return FAULT, [
        f"this is a fault of ckpt-prune, not of what you gave it ({type(error).__name__}{place}: {one_line(error)}). "
        f"Please report this line and the command to the developers; {DEBUG}=1 shows where it happened"
    ]


def _tell(code: int, lines: Sequence[str], *, as_json: bool) -> None:
    error, *hint = [to_one_line(line) for line in lines]
    with suppress(OSError):  # where nobody can be told, the exit code says it
        click.echo("\n".join([f"Error: {error}", *hint]), err=True)
    if as_json:
        with suppress(OutputError):
            click.echo(json.dumps({"error": {"code": code, "message": error}}, indent=2))
