"""Locks on files and folders. The system releases them when a run ends, in whatever way."""

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where two runs on one output are not told apart
    fcntl = None  # type: ignore[assignment]

from ckpt_prune.common.errors import UserError


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned descriptor is closed; None if the file system has no locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if lock_file(descriptor, folder, folder):
            return descriptor
    except UserError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def lock_file(descriptor: int, path: Path, what: Path) -> bool:
    """Lock an open file or folder at `path`, while `what` is written; False if the file system has no locks."""
    if fcntl is None:
        return False
    busy = UserError(f"{what} is being written by another run; wait for it or stop it")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return False  # a file system without locks
        raise busy from error
    # Another run may have moved or deleted it and made its own between the two calls: the lock is then on nothing.
    if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise busy
    return True
