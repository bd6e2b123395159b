"""Errors that are meant for the user."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_UNREADABLE = frozenset({errno.EIO, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE})
"""Error numbers of the system for a file that cannot be read, whatever it holds."""


class UserError(Exception):
    """Bad input: one line that names what is wrong and the remedy. The command line prints it and exits with code 2."""


class GgufFileError(UserError):
    """A GGUF file is given where a checkpoint is wanted."""

    def __init__(self, message: str, file: Path) -> None:
        super().__init__(message)
        self.file = file


class NoneLeftError(UserError):
    """No samples are left after those that were skipped."""


class DiskError(UserError):
    """The disk is full or cannot be written. Nothing is wrong with the input, so finished work may be kept."""


class AfterwardsError(UserError):
    """The output is complete, but what was to be done with it afterwards failed. `pruned` is what `prune` returns."""

    def __init__(self, message: str, pruned: Any) -> None:
        super().__init__(message)
        self.pruned = pruned


class GraphFailedError(AfterwardsError):
    """The output's graph cannot be made."""


class EvaluationFailedError(AfterwardsError):
    """The output cannot be measured."""


class PushFailedError(AfterwardsError):
    """The output cannot be pushed."""


class OutputError(DiskError):
    """Standard output cannot be written: a full disk, or a closed pipe."""


def one_line(error: BaseException) -> str:
    """Return what an error of another package says, in one line that is not too long."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def to_user_error(error: OSError) -> UserError:
    """Turn an error of the system that no code expected into a line for the user."""
    if error.filename is None:
        return UserError(f"{one_line(error)}; look at the disk and the files that were named")
    return UserError(f"{error.filename}: {error.strerror}; give another path or mend this one")


def to_memory_error(error: Exception, dry_run: bool) -> UserError | None:
    """Turn an error of Python or torch that says that memory ran out into a line for the user; None for any other.

    Args:
        dry_run: whether the command has the option `--dry-run`.
    """
    words = " ".join(str(error).split())
    is_torch = isinstance(error, RuntimeError) and ("can't allocate memory" in words or "not enough memory" in words)
    if not (isinstance(error, MemoryError) or is_torch or type(error).__name__ == "OutOfMemoryError"):
        return None
    remedy = "the same command with --dry-run says how much it needs" if dry_run else "free some and run it again"
    return UserError(
        f"memory ran out ({words[:200] or 'Python could get no more'}): {remedy}; fewer --samples need less"
    )


def find_interruption(error: BaseException) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that led to an error, if one did.

    A library's `finally` that reads what its `try` had not set yet raises UnboundLocalError in place of Ctrl-C.
    """
    return next((cause for cause in _causes(error) if isinstance(cause, KeyboardInterrupt)), None)


def find_unreadable_file(error: BaseException) -> OSError | None:
    """Return the system's error that led to an error, if it says that a file could not be read.

    It says nothing about what the file holds, so no check may fail because of it.
    """
    return next((cause for cause in _causes(error) if isinstance(cause, OSError) and cause.errno in _UNREADABLE), None)


def refuse_unreadable(error: BaseException) -> None:
    """Raise UserError if an error came from a file that the system could not read."""
    system = find_unreadable_file(error)
    if system is not None:
        raise to_user_error(system) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what led to it, the latest first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
