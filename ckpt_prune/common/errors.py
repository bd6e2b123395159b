"""The errors a user is meant to read."""

import errno
from collections.abc import Iterator

_UNREADABLE = frozenset({errno.EIO, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE})
"""What the system says of a file that it cannot give, whatever is in it."""


class UserError(Exception):
    """Bad input: one line that names what is wrong and the remedy. The command line prints it and exits with code 2."""


def named(error: OSError) -> UserError:
    """What the system says of a file that no one place expects it of: a name that no file can have, a failing disk."""
    if error.filename is None:
        return UserError(f"{' '.join(str(error).split())[:300]}; look at the disk and the files that were named")
    return UserError(f"{error.filename}: {error.strerror}; give another path or mend this one")


class NoneLeftError(UserError):
    """There are no samples beside those that were passed over."""


class DiskError(UserError):
    """The disk is full or cannot be written: nothing is wrong with what was asked, and what is done may be kept."""


def interruption(error: BaseException) -> KeyboardInterrupt | None:
    """The interruption that code of others turned into an error of its own while it unwound; None: there was none.

    A `finally` that reads what its `try` had not yet set raises an UnboundLocalError in place of Ctrl-C.
    """
    return next((each for each in _behind(error) if isinstance(each, KeyboardInterrupt)), None)


def unreadable(error: BaseException) -> OSError | None:
    """What the system said of a file it could not give, where an error comes of that; None: of something else.

    It says nothing of what is in the file, so no check may fail by it.
    """
    return next((each for each in _behind(error) if isinstance(each, OSError) and each.errno in _UNREADABLE), None)


def refuse_unreadable(error: BaseException) -> None:
    """Say what the system said, where an error comes of a file that it could not give.

    Raises:
        UserError: it does.
    """
    system = unreadable(error)
    if system is not None:
        raise named(system) from error


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error and those it came of, the latest first: pydantic's core names the cause of an error alone."""
    behind: BaseException | None = error
    while behind is not None:
        yield behind
        behind = behind.__cause__ or behind.__context__
