"""The folder an output grows in, beside its final place: who may write there, what is done, and the final swap.

OUT is only ever absent, the old folder or the finished new one. Until then everything is in `OUT.partial`, with a
journal of the units that are safely on disk, so that a killed run can go on where it stopped.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

from ckpt_prune.checkpoint.files import absolute_path, check_place, sync
from ckpt_prune.checkpoint.folder_kinds import OUTPUT_KIND, FolderKind, WantedNames, find_foreign, refuse_lost
from ckpt_prune.checkpoint.journal import JOURNAL, Journal, is_unfinished_run
from ckpt_prune.checkpoint.locks import lock_file, lock_folder
from ckpt_prune.checkpoint.swap import complete, swap
from ckpt_prune.common.errors import DiskError, UserError

SCRATCH = "measured"
"""Folder in a staging folder for what is measured on the way: --resume goes on with it, the output has none of it."""


class Staging:
    """`OUT.partial` and its journal, from the first byte to the swap; use it as a context manager, and `publish()`.

    Creating the object checks the rules and writes nothing, but it finishes a swap that a kill interrupted; entering is
    the first to write. After a kill or Ctrl-C the staging folder stays, and so it does after a crash or on a full disk,
    where a unit was done. Any other UserError in a run that was not resumed, and leaving without `publish()`, removes
    it; so does everything where an unfinished run is of no use. What is complete stays until it is in its place.

    Args:
        out: the folder to make; its parent must exist.
        job: digest of what makes it.
        resume: go on with what an equal job left.
        overwrite: replace OUT, and drop what an unfinished run left.
        kind: of folder.
        wants: names that the new folder will have, as far as they are known.

    Attributes:
        out: the folder to make, absolute.
        path: the staging folder.
        journal: of what is done.
        resumed: whether something was done already.
        active: whether it is entered, and not published yet.

    Raises:
        UserError: OUT or a staging folder exists and may not be replaced or resumed, or OUT's parent is not a folder.
    """

    def __init__(
        self,
        out: Path,
        *,
        job: str,
        resume: bool = False,
        overwrite: bool = False,
        kind: FolderKind = OUTPUT_KIND,
        wants: WantedNames | None = None,
    ) -> None:
        if resume and overwrite:
            raise UserError("--resume and --overwrite exclude each other; give one")
        self.out = check_place(out)
        self.path = partial_of(out, kind)
        self._kind, self._wants = kind, dict(wants or {})
        self.journal = Journal(self.path, job, overwrite, kind.left == "resumed")
        self._lock: int | None = None
        self.active = self._published = False

        with disk_failures(self.path):
            complete_swap(self.out, kind)
        self._known = os.path.lexists(self.path)
        if self._known:
            if not is_unfinished_run(self.path):
                raise UserError(
                    f"{self.path} exists and was not left by ckpt-prune; move it away or choose another output name"
                )
            self._take()
            self.release()
            if resume:
                self._continue()
            elif not overwrite:
                self._refuse_left()
        self.resumed = bool(self.journal.units) or self.journal.complete
        self._check_out(self._wants)

    def __enter__(self) -> "Staging":
        with disk_failures(self.path):
            self._check_out(self._wants)
            if self.path.exists():
                self._take()
                if not self._known:  # begun and ended by another run in the meantime
                    try:
                        self._refuse_left()
                    except UserError:
                        self.release()
                        raise
            if not self.resumed and self.path.exists():
                shutil.rmtree(self.path)
                self.release()
            if not self.path.exists():
                self._make()
                try:
                    # Before anything else, so that whatever a kill leaves behind is known to be ours.
                    self.journal.save()
                except BaseException:
                    self.discard()
                    raise
        self.active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.active = False
        if not self._published and not self._worth_keeping(kind):
            self.discard()
        self.release()

    def _worth_keeping(self, kind: type[BaseException] | None) -> bool:
        """Whether what is done so far is kept for another run.

        Bad input leaves nothing of a run of its own. Ctrl-C, exit requests, full disks and crashes (memory that ran
        out after hours) are no fault of what is done already, nor is anything of what an earlier run left.
        """
        if self._kind.left != "resumed" or kind is None:
            return False
        if self.resumed or self.journal.complete:
            return True
        if issubclass(kind, UserError) and not issubclass(kind, DiskError):
            return False
        return bool(self.journal.units) or not issubclass(kind, Exception)

    def _make(self) -> None:
        try:
            self.path.mkdir()
            self._take()
        except (FileExistsError, UserError):  # what is there is another run's
            raise
        except BaseException:  # a signal or a failing disk, before anything says whose it is
            with suppress(OSError):
                self.path.rmdir()
            raise

    @property
    def scratch(self) -> Path:
        """Where in the staging folder is what the output will have none of."""
        return self.path / SCRATCH

    def settle_layout(self, layout: str) -> None:
        """Enter what files, tensors and shapes the output has, once that is known.

        Raises:
            UserError: the run that is resumed had others.
        """
        if self.journal.layout is None:
            self.journal.layout = layout
            with disk_failures(self.path):
                self.journal.save()
        elif self.journal.layout != layout:
            raise UserError(f"{self.path} was begun with other tensors or shapes; --overwrite starts afresh")

    def publish(self) -> list[str]:
        """Put the staging folder in OUT's place; an old OUT is moved aside first and deleted last.

        Returns:
            Paths below OUT of what this tool did not write: they were in the old OUT and are in the new one.

        Raises:
            UserError: OUT appeared meanwhile, or has files that are in the way, or the disk refuses.
        """
        with disk_failures(self.path):
            if not self.journal.complete:
                for file in self.path.iterdir():
                    sync(file)
                self.journal.complete = True
                self.journal.save()
            names = {path.name: path for path in self.path.iterdir() if path.name not in (JOURNAL, SCRATCH)}
            self._check_out(self._wants | names)
            if self.scratch.exists():
                shutil.rmtree(self.scratch)
            try:
                kept = swap(self.path, self.out, self._kind)
            finally:
                # Whatever stopped it: where the folder is gone, it is in its place.
                self._published = not self.path.exists()
            self.active = False
        self.release()
        return kept

    def discard(self) -> None:
        """Delete the staging folder, if it is still there."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def _take(self) -> None:
        """Hold the staging folder against other runs; the system lets go of it when this one ends, however it ends.

        Raises:
            UserError: another run holds it.
        """
        if self._lock is None:
            self._lock = lock_folder(self.path)

    def release(self) -> None:
        """Let other runs have the staging folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_left(self) -> None:
        if self._kind.left != "dropped":
            goes_on = "--resume continues it, " if self._kind.left == "resumed" else ""
            raise UserError(f"{self.path} is left from an unfinished run; {goes_on}--overwrite starts afresh")

    def _check_out(self, wants: WantedNames) -> None:
        if not os.path.lexists(self.out):
            return
        written = self._kind.written(self.out)
        if not self.journal.replace:
            raise UserError(f"{self.out} exists; --overwrite replaces it")
        refuse_lost(self.out, find_foreign(self.out, written), wants)

    def _continue(self) -> None:
        """Take over what the journal of an unfinished run says is done; a folder that never got one has none."""
        if not (self.path / JOURNAL).exists():
            return
        try:
            found = Journal.read(self.path)
        except ValueError as error:
            raise UserError(f"{self.path} has no readable journal to resume from; --overwrite starts afresh") from error
        if found.job != self.journal.job:
            raise UserError(
                f"{self.path} was begun by a different job; --resume needs the same one, --overwrite starts afresh"
            )
        # A run begun with --overwrite may still replace OUT when it is resumed.
        self.journal = found


def partial_of(out: Path, kind: FolderKind = OUTPUT_KIND) -> Path:
    """The staging folder of an output; hidden where nobody goes on with it."""
    whole = absolute_path(out)
    return whole.with_name(f"{'.' if kind.left == 'dropped' else ''}{whole.name}.partial")


def complete_swap(out: Path, kind: FolderKind = OUTPUT_KIND) -> None:
    """Finish or undo a swap that a kill interrupted.

    Raises:
        UserError: another run is at it, or files that are to be kept have no place.
    """
    whole = absolute_path(out)
    held = lock_folder(whole) if whole.is_dir() else None
    try:
        complete(whole, kind)
    finally:
        if held is not None:
            os.close(held)


def refuse_overlap(source: Path, out: Path) -> None:
    """Refuse an output that is, contains or is inside what it is made from.

    Raises:
        UserError: it does.
    """
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UserError(f"output {out} overlaps the source {source}: choose a place outside it")


def refuse_inside(out: Path, inputs: Iterable[Path | None]) -> None:
    """Refuse an output that holds what it is made from: its files move when it is replaced.

    Raises:
        UserError: an input lies inside.
    """
    folder = out.resolve()
    for path in inputs:
        if path is not None and folder in path.resolve().parents:
            raise UserError(f"{path} lies inside the output {out}: choose another output name, or move it away")


def check_output(
    source: Path,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    inputs: Iterable[Path | None] = (),
    wants: WantedNames | None = None,
) -> None:
    """Refuse a place for the output before any work is done.

    Args:
        source: what the output is made from.
        out: the place.
        resume: whether an unfinished run is to be gone on with: that one's rules count.
        overwrite: whether an old output may be replaced.
        inputs: other files and folders that are read.
        wants: names that the output will have, as far as they are known.

    Raises:
        UserError: it is, contains or is inside the source, holds an input, or may not be written.
    """
    refuse_overlap(source, out)
    refuse_inside(out, inputs)
    if not resume:
        Staging(out, job="", overwrite=overwrite, wants=wants)


@contextmanager
def disk_failures(path: Path) -> Iterator[None]:
    """Turn what the operating system says against writing at `path` into a DiskError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # numpy's own errors of a full disk have no number, and the safetensors library's are no OSError.
        reason = getattr(error, "strerror", None) or error
        raise DiskError(f"cannot write {path} ({reason}); free space or choose another place") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all.

    It grows beside its place under a name that follows from its own: what a kill leaves, the next who writes it takes.

    Raises:
        UserError: the disk is full, the folder cannot be written, or another run writes the same file.
    """
    fresh = path.with_name(f".{path.name}.ckpt_prune-partial")
    with disk_failures(path):
        # Not through a link that somebody put there, and open to whoever the umask lets read it.
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            lock_file(descriptor, fresh, path)
            try:
                os.ftruncate(descriptor, 0)
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(text.encode())
                sync(fresh)
                fresh.replace(path)
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
        finally:
            os.close(descriptor)
