"""Files from others: only regular ones, up to a stated size, unchanged from the first read to the last. And places."""

import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_prune.common.errors import UserError

MOST_BYTES = 2**28
"""Limit for a file that is read whole. The reports and plans of the largest models are half as large."""

Stamp = tuple[int, int, int, int]
"""Size, time of change, time of the last change of anything, and inode of a file.

It differs once the file is replaced or written to: whoever sets the first time back changes the second.
"""


def open_input(path: Path) -> io.FileIO:
    """Open a regular file for plain reads. Raises OSError, also for a FIFO, which would wait for its writer."""
    return io.FileIO(path, opener=_open_regular)


def read_input(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes. Raises OSError."""
    with open_input(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, which is more than the {most} that such a file may have")
        return handle.read()


def stamp_of(file: Path | int) -> Stamp:
    """Return the stamp of a file, given by path or descriptor."""
    status = os.stat(file)  # noqa: PTH116 - of a descriptor, too
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def sha256_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the hex SHA-256 of each named file of a folder, read as a stream."""
    digests = {}
    for name in names:
        with open_input(folder / name) as handle:
            digests[name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return digests


def read_unchanged(path: Path, stamps: dict[Path, Stamp]) -> bytes:
    """Read a file whole, and note its stamp by its path; UserError if it is not the one that was read there before."""
    stamp = stamp_of(path)
    data = path.read_bytes()
    if stamps.setdefault(path, stamp) != stamp_of(path):
        raise UserError(f"{path} changed since it was opened; run again")
    return data


def stamps_of(folder: Path) -> dict[str, Stamp]:
    """Return the stamps of a folder's files by name, with slashes; not of hidden folders, or what links lead into."""
    stamps: dict[str, Stamp] = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [path for path in map(Path(place).__truediv__, names) if path.is_file()]
        stamps |= {path.relative_to(folder).as_posix(): stamp_of(path) for path in files}
    return stamps


def find_changed(folder: Path, stamps: Mapping[str, Stamp], names: Iterable[str]) -> str | None:
    """Return the first of the named files that is gone or has another stamp than before, or None."""
    for name in names:
        try:
            if stamp_of(folder / name) != stamps.get(name):
                return name
        except OSError:
            return name
    return None


def _open_regular(path: str, flags: int) -> int:
    # Without O_NONBLOCK the very opening of a FIFO waits; for a regular file it changes nothing.
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def absolute_path(path: Path) -> Path:
    """Make a path absolute without following links: a link at an output's place must not be replaced by its target."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link


def check_place(out: Path) -> Path:
    """Return the absolute path of an output, once the folder that it goes in exists."""
    place = absolute_path(out)
    if not place.parent.is_dir():
        raise UserError(f"the folder {place.parent} does not exist; create it first")
    return place
