"""Files that come from others: regular ones, of a stated size at most, and the same from the first read to the last."""

import errno
import io
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

MOST_BYTES = 2**28
"""Of a file that is read whole. The reports and plans of the largest models are half as large."""

Stamp = tuple[int, int, int]
"""Size, time of change and inode of a file: another one, or one that was written to, has another."""


def open_input(path: Path) -> io.FileIO:
    """Open a file for plain reads.

    Raises:
        OSError: it is not there, cannot be read, or is no regular file: a FIFO would wait for whoever writes to it.
    """
    return io.FileIO(path, opener=_regular)


def read_input(path: Path, most: int = MOST_BYTES) -> bytes:
    """What is in a file.

    Raises:
        OSError: as `open_input`, or it holds more bytes than `most`.
    """
    with open_input(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, which is more than the {most} that such a file may have")
        return handle.read()


def stamp(file: Path | int) -> Stamp:
    """The stamp of a file, by its path or descriptor."""
    found = os.stat(file)  # noqa: PTH116 - of a descriptor, too
    return found.st_size, found.st_mtime_ns, found.st_ino


def changed_since(folder: Path, stamps: Mapping[str, Stamp], names: Iterable[str]) -> str | None:
    """The first of a folder's files that is gone, or not what it was; None where all are.

    Args:
        folder: the folder.
        stamps: of its files, by name, when they were looked at.
        names: of the files that count.
    """
    for name in names:
        try:
            if stamp(folder / name) != stamps.get(name):
                return name
        except OSError:
            return name
    return None


def _regular(path: str, flags: int) -> int:
    # Without O_NONBLOCK the very opening of a FIFO waits; of a regular file it changes nothing.
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor
