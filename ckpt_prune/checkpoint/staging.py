"""The folder in which an output grows, next to its final place: who may write there, progress, and the final swap.

OUT is only ever absent, the old folder or the finished new one. Until then everything is in `OUT.partial`, with a
journal of what is safely on disk, so that a killed run can resume.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

from ckpt_prune.checkpoint.files import absolute_path, check_place, sync
from ckpt_prune.checkpoint.folder_kinds import OUTPUT_KIND, FolderKind, WantedNames, find_foreign, refuse_lost
from ckpt_prune.checkpoint.journal import JOURNAL, WRITTEN, Journal, is_unfinished_run
from ckpt_prune.checkpoint.locks import lock_file, lock_folder
from ckpt_prune.checkpoint.swap import complete, swap
from ckpt_prune.common.errors import DiskError, UserError
from ckpt_prune.common.filenames import partial_name

SCRATCH = "measured"
"""Folder in a staging folder for measurements that --resume needs and the output does not hold."""


class Staging:
    """`OUT.partial` and its journal, from the first byte to the swap. Use it as a context manager, and `publish()`.

    Creating the object checks the rules and writes nothing, except that it finishes a swap that was killed. Entering it
    writes. The staging folder stays after a kill or Ctrl-C, and after a crash or full disk once an entry is made. It is
    removed after any other UserError in a run that was not resumed, after leaving without `publish()`, and whenever
    unfinished runs of this kind are of no use. A complete one stays until it is in its place.

    Args:
        out: folder to make; its parent must exist.
        job: digest of everything that the output depends on.
        parts: name of each part of the job → what it is, or its digest; a refusal says which differ.
        resume: continue what an equal job left.
        overwrite: replace OUT, and delete what an unfinished run left.
        kind: of folder.
        wants: names that the new folder will have, as far as they are known.

    Attributes:
        out: folder to make, absolute.
        path: staging folder.
        scratch: folder in it for files that the output does not hold.
        journal: of finished entries.
        resumed: whether some entries are done by an earlier run.
        changed: first entry of the earlier run whose files beside the output's are not as it wrote them. The journal
            lacks it and all that came after it, so that they are made again. None if there is no such entry.
        active: whether the object is entered and not published yet.
    """

    def __init__(
        self,
        out: Path,
        *,
        job: str,
        parts: Mapping[str, str] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        kind: FolderKind = OUTPUT_KIND,
        wants: WantedNames | None = None,
    ) -> None:
        if resume and overwrite:
            raise UserError("--resume and --overwrite exclude each other; give one")
        self.out = check_place(out)
        self.path = partial_of(out, kind)
        self.scratch = self.path / SCRATCH
        self._kind, self._wants = kind, dict(wants or {})
        self.journal = Journal(self.path, job, overwrite, kind.unfinished == "resumed", parts=dict(parts or {}))
        self.changed: str | None = None
        self._lock: int | None = None
        self.active = self._published = False

        with disk_failures(self.path):
            complete_swap(self.out, kind)
        self._existed = os.path.lexists(self.path)
        if self._existed:
            if not is_unfinished_run(self.path):
                raise UserError(
                    f"{self.path} exists and was not left by ckpt-prune; move it away or choose another output name"
                )
            self._take_lock()
            self.release()
            if resume:
                self._continue()
            elif not overwrite:
                self._refuse_unfinished()
        self.resumed = bool(self.journal.entries) or self.journal.complete
        self._check_out(self._wants)

    def __enter__(self) -> "Staging":
        with disk_failures(self.path):
            self._check_out(self._wants)
            if self.path.exists():
                self._take_lock()
                if not self._existed:  # begun and ended by another run in the meantime
                    try:
                        self._refuse_unfinished()
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
        if not self._published and not self._is_worth_keeping(kind):
            self.discard()
        self.release()

    def _is_worth_keeping(self, kind: type[BaseException] | None) -> bool:
        """Return whether the staging folder is kept for another run after an exception of this kind.

        Bad input deletes what its own run did. Ctrl-C, exit requests, full disks and crashes (memory that ran out after
        hours) keep it, and everything keeps the work of an earlier run.
        """
        if self._kind.unfinished != "resumed" or kind is None:
            return False
        if self.resumed or self.journal.complete:
            return True
        if issubclass(kind, UserError) and not issubclass(kind, DiskError):
            return False
        return bool(self.journal.entries) or not issubclass(kind, Exception)

    def _make(self) -> None:
        try:
            self.path.mkdir()
            self._take_lock()
        except (FileExistsError, UserError):  # the folder is another run's
            raise
        except BaseException:  # a signal or a failing disk, before anything says whose it is
            with suppress(OSError):
                self.path.rmdir()
            raise

    def settle_layout(self, layout: str) -> None:
        """Enter the digest of the output's files, tensors and shapes, and refuse another one than the resumed run's."""
        if self.journal.layout is None:
            self.journal.layout = layout
            with disk_failures(self.path):
                self.journal.save()
        elif self.journal.layout != layout:
            raise UserError(f"{self.path} was begun with other tensors or shapes; --overwrite starts afresh")

    def mark_written(self) -> None:
        """Enter that nothing but exports is left to do."""
        with disk_failures(self.path):
            self._sync()
            self.journal.record(WRITTEN)

    def _sync(self) -> None:
        for file in self.path.iterdir():
            sync(file)

    def publish(self) -> list[str]:
        """Put the staging folder in OUT's place; an old OUT is moved aside first and deleted last.

        Returns:
            Paths below OUT that this tool did not write: they were in the old OUT and are in the new one.
        """
        with disk_failures(self.path):
            if not self.journal.complete:
                self._sync()
                self.journal.complete = True
                self.journal.save()
            names = {path.name: path for path in self.path.iterdir() if path.name not in (JOURNAL, SCRATCH)}
            self._check_out(self._wants | names)
            if self.scratch.exists():
                shutil.rmtree(self.scratch)
            try:
                kept = swap(self.path, self.out, self._kind)
            finally:
                # Whatever stopped it: if the folder is gone, it is in its place.
                self._published = not self.path.exists()
            self.active = False
        self.release()
        return kept

    def discard(self) -> None:
        """Delete the staging folder, if it is still there."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def _take_lock(self) -> None:
        if self._lock is None:
            self._lock = lock_folder(self.path)

    def release(self) -> None:
        """Let other runs use the staging folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_unfinished(self) -> None:
        if self._kind.unfinished != "dropped":
            goes_on = "--resume continues it, " if self._kind.unfinished == "resumed" else ""
            raise UserError(f"{self.path} is left from an unfinished run; {goes_on}--overwrite starts afresh")

    def _check_out(self, wants: WantedNames) -> None:
        if not os.path.lexists(self.out):
            return
        written = self._kind.list_written(self.out)
        if not self.journal.replace:
            raise UserError(f"{self.out} exists; --overwrite replaces it, or give another -o")
        refuse_lost(self.out, find_foreign(self.out, written), wants)

    def _continue(self) -> None:
        """Take over the journal of an unfinished run, if it has one."""
        if not (self.path / JOURNAL).exists():
            return
        try:
            journal = Journal.read(self.path)
        except ValueError as error:
            raise UserError(f"{self.path} has no readable journal to resume from; --overwrite starts afresh") from error
        if journal.job != self.journal.job:
            differ = sorted(name for name, _ in set(journal.parts.items()) ^ set(self.journal.parts.items()))
            of = f" (it had another {', '.join(dict.fromkeys(differ))})" if differ else ""
            raise UserError(
                f"{self.path} was begun by a different job{of}; --resume needs the same one, --overwrite starts afresh"
            )
        # A run begun with --overwrite may still replace OUT when it is resumed.
        self.journal = journal
        # A complete one needs no files beside the output's, and may have lost some of them.
        if not journal.complete:
            self._drop_changed()

    def _drop_changed(self) -> None:
        self.changed = next((entry for entry in self.journal.entries if not self.journal.has_files(entry)), None)
        if self.changed is not None:
            self.journal.drop_from(self.changed)

    def reopen(self) -> None:
        """Take a complete output for one that is not: what is not as it was written is made again."""
        self.journal.complete = False
        self.journal.entries.pop(WRITTEN, None)
        self._drop_changed()
        self.resumed = bool(self.journal.entries)


def partial_of(out: Path, kind: FolderKind = OUTPUT_KIND) -> Path:
    """Return the staging folder of an output; it is hidden if no run resumes it."""
    place = absolute_path(out)
    return place.with_name(f"{'.' if kind.unfinished == 'dropped' else ''}{place.name}.partial")


def complete_swap(out: Path, kind: FolderKind = OUTPUT_KIND) -> None:
    """Finish or undo a swap that was killed, unless another run is at it."""
    place = absolute_path(out)
    lock = lock_folder(place) if place.is_dir() else None
    try:
        complete(place, kind)
    finally:
        if lock is not None:
            os.close(lock)


def refuse_overlap(source: Path, out: Path) -> None:
    """Refuse an output that is, contains or is inside its source."""
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UserError(f"output {out} overlaps the source {source}: choose a place outside it")


def refuse_inside(out: Path, inputs: Iterable[Path | None]) -> None:
    """Refuse an output that holds one of its inputs, whose files would move when it is replaced."""
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
    kind: FolderKind = OUTPUT_KIND,
) -> None:
    """Refuse an impossible place for the output before any work is done.

    With `resume`, the rules of the unfinished run count. `inputs` are other files and folders that are read, `wants`
    names that the output will have, as far as they are known, `kind` what kind of folder it will be.
    """
    refuse_overlap(source, out)
    refuse_inside(out, inputs)
    if not resume:
        Staging(out, job="", overwrite=overwrite, kind=kind, wants=wants)


@contextmanager
def disk_failures(path: Path) -> Iterator[None]:
    """Turn the system's errors while writing at `path` into a DiskError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # numpy's own errors of a full disk have no number, and the safetensors library's are no OSError.
        reason = getattr(error, "strerror", None) or error
        raise DiskError(f"cannot write {path} ({reason}); free space or choose another place") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with staged_file(path) as (_, descriptor):
        os.ftruncate(descriptor, 0)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(text.encode())


@contextmanager
def staged_file(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield a file, with its open descriptor, that takes the place of `path` if the body ends without an exception.

    It grows next to its place under a name that follows from its own, so that the next writer takes what a kill left.
    UserError if another run writes it.
    """
    fresh = path.with_name(partial_name(path.name))
    with disk_failures(path):
        # Not through a link that somebody put there, and open to whoever the umask lets read it.
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            lock_file(descriptor, fresh, path)
            try:
                yield fresh, descriptor
                sync(fresh)
                fresh.replace(path)
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
        finally:
            os.close(descriptor)
