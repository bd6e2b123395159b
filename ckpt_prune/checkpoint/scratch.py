"""A folder in the system's temporary one for what no output holds; the next run clears what a killed one left there."""

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
"""Of the file beside such a folder that is held as long as it is in use. A folder without one was left on purpose."""


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
        held, name = tempfile.mkstemp(prefix=PREFIX, suffix=_LOCK, dir=place)
        mark, folder = Path(name), Path(name.removesuffix(_LOCK))
        lock_file(held, mark, folder)
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
        os.close(held)


def _clear(place: Path) -> None:
    """Delete such folders of this user that nobody holds any more."""
    if os.name != "posix":  # where nobody can tell
        return
    for path in place.glob(f"{PREFIX}*{_LOCK}"):
        folder = path.with_name(path.name.removesuffix(_LOCK))
        with suppress(OSError, UserError):
            if folder.is_symlink() or path.lstat().st_uid != os.getuid():
                continue
            held = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if lock_file(held, path, path):
                    shutil.rmtree(folder, ignore_errors=True)
                    path.unlink()
            finally:
                os.close(held)
