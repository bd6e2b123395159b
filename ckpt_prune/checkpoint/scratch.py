"""Temporary folders for data that no output holds. The next run deletes those of runs that were killed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_prune.checkpoint.locks import lock_file
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import UserError

PREFIX = "ckpt-prune-scratch-"
_LOCK = ".lock"
"""Ending of the file beside such a folder that is locked during its use. A folder without one was kept on purpose."""


@contextmanager
def scratch_folder(*, keeps: str | None = None) -> Iterator[Path]:
    """Make a folder in the system's temporary one (TMPDIR), and delete it at the end.

    Args:
        keeps: ending of names of files, directly in it, that stay because an error message points to them.
    """
    place = Path(tempfile.gettempdir())
    _delete_abandoned(place)
    with disk_failures(place):
        descriptor, name = tempfile.mkstemp(prefix=PREFIX, suffix=_LOCK, dir=place)
        mark, folder = Path(name), Path(name.removesuffix(_LOCK))
        lock_file(descriptor, mark, folder)
        folder.mkdir(0o700)
    try:
        yield folder
    finally:
        kept = {path for path in folder.iterdir() if keeps is not None and path.name.endswith(keeps)}
        for path in set(folder.iterdir()) - kept:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
        mark.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def hidden_folder(place: Path, name: str) -> Iterator[Path]:
    """Make a folder in another, whose disk is to hold the data, and delete it at the end.

    Args:
        name: how its own starts, after a dot.
    """
    with disk_failures(place):
        folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _delete_abandoned(place: Path) -> None:
    """Delete this user's scratch folders that no process holds any more."""
    if os.name != "posix":  # nothing tells whether a folder is held
        return
    for path in place.glob(f"{PREFIX}*{_LOCK}"):
        folder = path.with_name(path.name.removesuffix(_LOCK))
        with suppress(OSError, UserError):
            if folder.is_symlink() or path.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if lock_file(descriptor, path, path):
                    shutil.rmtree(folder, ignore_errors=True)
                    path.unlink()
            finally:
                os.close(descriptor)
