"""The folder an output grows in, beside its final place: who may write there, what is done, and the final swap.

OUT is only ever absent, the old folder or the finished new one. Until then everything is in `OUT.partial`, with a
journal of the units that are safely on disk, so that a killed run can go on where it stopped.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows, where two runs on one output are not told apart
    fcntl = None  # type: ignore[assignment]

from ckpt_prune.checkpoint.jsonfile import parse_object, pretty
from ckpt_prune.errors import UserError

# Hidden and unlike any published file: it is removed only after the swap, so that a kill there costs nothing.
JOURNAL = ".ckpt_prune_journal.json"
_VERSION = 1


class Staging:
    """`OUT.partial` and its journal.

    Creating the object checks the rules and changes nothing; `start` is the first to write.

    Args:
        out: the folder to make; its parent must exist.
        job, layout: digests of what makes it and of what is in it.
        resume: go on with what an equal job left.
        overwrite: replace OUT, and drop what an unfinished run left.
        holds: pattern of a file that, beside config.json, shows that an existing OUT may be replaced.
        what: such a folder is, in messages.
        resumable: whether an unfinished run can be gone on with at all.

    Attributes:
        path: the staging folder.
        units: the units recorded as done, each with the tensor names it holds.
        notes: what was noted with them.

    Raises:
        UserError: OUT or a staging folder exists and may not be replaced or resumed, or OUT's parent is not a folder.
    """

    def __init__(
        self,
        out: Path,
        *,
        job: str,
        layout: str,
        resume: bool,
        overwrite: bool,
        holds: str = "*.safetensors",
        what: str = "a checkpoint folder",
        resumable: bool = True,
    ) -> None:
        if resume and overwrite:
            raise UserError("--resume and --overwrite exclude each other; give one")
        self._out = Path(os.path.abspath(out))  # noqa: PTH100 - resolve() would follow a link we must not replace
        self.path = self._out.with_name(self._out.name + ".partial")
        self._aside = self._out.with_name(f".{self._out.name}.ckpt_prune-replaced")
        self._job, self._layout, self._replace = job, layout, overwrite
        self._holds, self._what = holds, what
        self.units: dict[str, list[str]] = {}
        self.notes: dict[str, Any] = {}
        self._lock: int | None = None

        if not self._out.parent.is_dir():
            raise UserError(f"the folder {self._out.parent} does not exist; create it first")
        if os.path.lexists(self.path):
            self._check_own()
            self._take()
            self.release()
            if resume:
                self._continue()
            elif not overwrite:
                goes_on = "--resume continues it, " if resumable else ""
                raise UserError(f"{self.path} is left from an unfinished run; {goes_on}--overwrite starts afresh")
        self._check_out()

    def start(self) -> None:
        """Make the staging folder, or clear all but the journalled work of the one being resumed."""
        with disk_failures(self.path):
            self._undo_interrupted_swap()
            self._check_out()
            if self.path.exists():
                self._take()
            if not self.units and self.path.exists():
                shutil.rmtree(self.path)
                self.release()
            if not self.path.exists():
                self.path.mkdir()
                self._take()
                # Before anything else, so that whatever a kill leaves behind is known to be ours.
                self.record(None, [])

    def record(self, unit: str | None, names: Iterable[str], note: Any = None) -> None:
        """Journal `unit` as done, with a JSON note, atomically. The caller has its bytes on disk already."""
        if unit is not None:
            self.units[unit] = sorted(names)
        if unit is not None and note is not None:
            self.notes[unit] = note
        journal = {
            "version": _VERSION,
            "job": self._job,
            "layout": self._layout,
            "replace": self._replace,
            "units": self.units,
            "notes": self.notes,
        }
        fresh = self.path / f"{JOURNAL}.tmp"
        fresh.write_text(pretty(journal), encoding="utf-8")
        sync(fresh)
        fresh.replace(self.path / JOURNAL)
        sync(self.path)

    def publish(self) -> None:
        """Put the staging folder in OUT's place; an old OUT is moved aside first and deleted last."""
        self._check_out()
        for file in self.path.iterdir():
            sync(file)
        sync(self.path)
        if self._out.exists():
            self._out.rename(self._aside)
        try:
            self.path.rename(self._out)
        except OSError:
            self._undo_interrupted_swap()
            raise
        self.release()
        (self._out / JOURNAL).unlink()
        sync(self._out)
        sync(self._out.parent)
        if self._aside.exists():
            shutil.rmtree(self._aside)

    def discard(self) -> None:
        """Delete the staging folder, if it is still there."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def _take(self) -> None:
        """Hold the staging folder against other runs; the system lets go of it when this one ends, however it ends.

        Raises:
            UserError: another run holds it.
        """
        if fcntl is None or self._lock is not None:
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks
            raise UserError(f"{self.path} is being written by another run; wait for it or stop it") from error
        self._lock = descriptor

    def release(self) -> None:
        """Let other runs have the staging folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_out(self) -> None:
        if not os.path.lexists(self._out):
            return
        is_own = (self._out / "config.json").is_file() and any(self._out.glob(self._holds))
        if not is_own or self._out.is_symlink():
            raise UserError(f"{self._out} exists and is not {self._what}, so it is never replaced; choose another name")
        if not self._replace:
            raise UserError(f"{self._out} exists; --overwrite replaces it")

    def _check_own(self) -> None:
        is_folder = self.path.is_dir() and not self.path.is_symlink()
        # An empty one is what a kill right after mkdir leaves.
        if not is_folder or (any(self.path.iterdir()) and not (self.path / JOURNAL).is_file()):
            raise UserError(
                f"{self.path} exists and was not left by ckpt-prune; move it away or choose another output name"
            )

    def _continue(self) -> None:
        """Take over what the journal of an unfinished run says is done; an empty folder has none."""
        if not (self.path / JOURNAL).exists():
            return
        try:
            journal = parse_object((self.path / JOURNAL).read_bytes())
            version, job, layout = journal["version"], journal["job"], journal["layout"]
            units, replace = dict(journal["units"]), bool(journal["replace"])
            notes = dict(journal["notes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} has no readable journal to resume from; --overwrite starts afresh") from error
        if version != _VERSION or job != self._job:
            raise UserError(
                f"{self.path} was begun by a different job; --resume needs the same one, --overwrite starts afresh"
            )
        if layout != self._layout:
            raise UserError(f"{self.path} was begun with other tensors or shapes; --overwrite starts afresh")
        self.units, self.notes = units, notes
        # A run begun with --overwrite may still replace OUT when it is resumed.
        self._replace = replace

    def _undo_interrupted_swap(self) -> None:
        if not self._aside.exists():
            return
        if self._out.exists():
            shutil.rmtree(self._aside)  # the swap was through, only the deletion was not
        else:
            self._aside.rename(self._out)


def refuse_overlap(source: Path, out: Path) -> None:
    """Refuse an output that is, contains or is inside what it is made from.

    Raises:
        UserError: it does.
    """
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UserError(f"output {out} overlaps the source {source}: choose a place outside it")


def check_output(source: Path, out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse a place for the output before any work is done.

    Raises:
        UserError: it is, contains or is inside the source, or may not be written.
    """
    refuse_overlap(source, out)
    if not resume:
        Staging(out, job="", layout="", resume=False, overwrite=overwrite)


@contextmanager
def disk_failures(path: Path) -> Iterator[None]:
    """Turn what the operating system says against writing at `path` into a UserError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error  # numpy's own errors of a full disk have no number
        raise UserError(f"cannot write {path} ({reason}); free space or choose another place") from error


def sync(path: Path) -> None:
    """Wait until the file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    with (
        disk_failures(path),
        tempfile.TemporaryDirectory(prefix=".ckpt-prune-", dir=path.absolute().parent) as scratch,
    ):
        whole = Path(scratch) / path.name
        whole.write_bytes(text.encode())
        sync(whole)
        whole.replace(path)
