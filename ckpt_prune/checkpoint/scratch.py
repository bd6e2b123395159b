"""A folder in the system's temporary one for what no output holds; the next run clears what a killed one left there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_prune.checkpoint.locks import lock
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.errors import UserError

PREFIX = "ckpt-prune-scratch-"
_LOCK = ".lock"
"""File that is held as long as the folder is in use. A folder without it was left on purpose."""


@contextmanager
def scratch_folder(*, keeps: str | None = None) -> Iterator[Path]:
    """A new folder, which goes at the end; those of runs that were killed go first.

    Args:
        keeps: files whose names end so stay, directly in it: what errors speak of.

    Raises:
        UserError: the system's temporary folder (environment variable TMPDIR) cannot be written.
    """
    place = Path(tempfile.gettempdir())
    _clear(place)
    with disk_failures(place):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        held = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(held, folder / _LOCK, folder)
        yield folder
    finally:
        os.close(held)
        kept = {path for path in folder.iterdir() if keeps is not None and path.name.endswith(keeps)}
        for path in set(folder.iterdir()) - kept:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _clear(place: Path) -> None:
    """Delete such folders of this user that nobody holds any more."""
    if os.name != "posix":  # where nobody can tell
        return
    for path in place.glob(f"{PREFIX}*/{_LOCK}"):
        with suppress(OSError, UserError):
            if path.parent.is_symlink() or path.lstat().st_uid != os.getuid():
                continue
            held = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if lock(held, path, path):
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(held)
