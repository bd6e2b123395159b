"""Faults at file operations of this process: one fails, is cut short, or is the moment in which a signal comes.

Operations are counted by Python's audit events (open, mkdir, rename, remove, rmdir, chmod, truncate, list) and, where
it has none, by wrappers (write, fsync, fallocate). Nothing is undone: it is for a process that ends soon.
"""

import builtins
import errno
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import save

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EDQUOT")
TORN = ("short", "torn-ENOSPC", "torn-SIGKILL")
"""Of a write: half is written and said so; half is, and then the disk is full; half is, and then the process ends."""
DISTURBED = ("rewritten", "cut", "deleted")
"""What becomes of an input meanwhile."""
FULL = "full"
"""No write fits any more, from that operation on."""
SHRUNK = "shrunk"
"""The output lies on a disk of its own, which from that operation on has no more room than it needs by then: a real
one, in memory, which takes a right to mount it."""
REACHED = "reached"
"""Nothing but a byte, written to the descriptor that `Fault.to` names: another process waits for it."""
CHANGES = frozenset({"create", "write", "sync", "mkdir", "rename", "remove", "rmdir", "chmod", "claim", "truncate"})
GROWS = frozenset({"create", "write", "mkdir", "claim"})
"""What a full disk refuses."""
_EVENTS = {
    "os.mkdir": ("mkdir", 2),
    "os.rename": ("rename", 2),
    "os.remove": ("remove", 1),
    "os.rmdir": ("rmdir", 1),
    "os.chmod": ("chmod", 2),
    "os.truncate": ("truncate", None),
    "os.listdir": ("list", None),
    "os.scandir": ("list", None),
}
"""Audit event → its name here, and which of its arguments is the folder that the path is relative to."""


@dataclass(frozen=True)
class Fault:
    """A fault says what happens at which operation, counted from 1.

    `to` is an input that is disturbed, a disk that shrinks, or a descriptor that is written to.
    """

    at: int
    what: str
    to: str = ""


@dataclass(frozen=True)
class Operation:
    """An operation says what was done to which file below the folders that are watched."""

    what: str
    path: str


class Shim:
    """Watches some folders, and does what is asked when its time comes.

    Args:
        roots: what happens below these counts.
        fault: None only counts.
    """

    def __init__(self, roots: tuple[Path, ...], fault: Fault | None) -> None:
        self._roots = tuple(str(root) for root in roots)
        self._fault = fault
        self.seen: list[Operation] = []
        self._busy = False
        self._torn = False

    def install(self) -> None:
        """Start watching."""
        for signal_name in SIGNALS[1:]:
            number = getattr(signal, signal_name)
            signal.signal(number, signal.default_int_handler if signal_name == "SIGINT" else signal.SIG_DFL)
        shim, plain_open, sync, claim = self, io.open, os.fsync, os.posix_fallocate

        def open_watched(file: Any, mode: str = "r", buffering: int = -1, *others: Any, **more: Any) -> Any:
            if not set(mode) & set("wax+") or shim._of(file) is None:
                return plain_open(file, mode, buffering, *others, **more)
            return shim._watched(file, mode, buffering, *others, **more)

        def count_sync(descriptor: Any) -> None:
            shim._reach("sync", shim._of(descriptor))

        def count_and_claim(descriptor: Any, offset: int, size: int) -> None:
            shim._reach("claim", shim._of(descriptor))
            claim(descriptor, offset, size)

        def save_watched(tensors: Any, path: Any, metadata: Any = None) -> None:
            # The library's own goes through no Python; these are its bytes.
            with open_watched(path, "wb") as file:
                file.write(save(tensors, metadata))

        del sync  # nothing here has a power cut
        io.open = builtins.open = open_watched  # type: ignore[assignment]
        os.fsync, os.posix_fallocate = count_sync, count_and_claim  # type: ignore[assignment]
        shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
        for name in ("ckpt_prune.measure.statistics.folder", "ckpt_prune.stages.rotation.learner"):
            importlib.import_module(name).save_file = save_watched  # type: ignore[attr-defined]
        sys.addaudithook(self._audit)

    def off(self) -> None:
        """Count no more."""
        self._busy = True

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        if self._busy:
            return
        if event == "open":
            changes = given[2] & (os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR)
            self._reach("create" if changes else "open", self._of(given[0]))
        elif event in _EVENTS:
            what, place = _EVENTS[event]
            inside = -1 if place is None or len(given) <= place else given[place]
            self._reach(what, self._of(given[0], inside))

    def _of(self, path: Any, inside: int = -1) -> str | None:
        """The path below a watched folder; None for any other."""
        if path is None:
            return None
        if isinstance(path, int):
            resolved = str(Path(f"/proc/self/fd/{path}").readlink())
        else:
            name = os.fsdecode(path)
            base = Path() if inside in (-1, None) else Path(f"/proc/self/fd/{inside}").readlink()
            resolved = os.path.abspath(base / name)  # noqa: PTH100 - a link counts as itself
        return next((resolved for root in self._roots if resolved == root or resolved.startswith(f"{root}/")), None)

    def _reach(self, what: str, path: str | None, half: Any = None) -> int | None:
        """Count an operation, and let the fault happen if it is due. Returns the bytes of a short write, else None."""
        if path is None or self._busy:
            return None
        self.seen.append(Operation(what, path))
        fault = self._fault
        if fault is None or len(self.seen) < fault.at:
            return None
        if fault.what == SHRUNK:
            if len(self.seen) == fault.at:
                self._busy = True
                disk = os.statvfs(fault.to)
                # None at all would be no limit.
                mount(Path(fault.to), max(1, disk.f_blocks - disk.f_bfree) * disk.f_frsize, options="remount,")
                self._busy = False
            return None
        if fault.what == FULL:
            return _fail("ENOSPC", what, path) if what in GROWS else None
        if fault.what in TORN:
            # Only a write can be torn: the first from there on, if another operation has come in between.
            if half is None or self._torn:
                return None
            self._torn = True
        elif len(self.seen) > fault.at:
            return None
        if fault.what in DISTURBED:
            self._busy = True
            disturb(Path(fault.to), fault.what)
            self._busy = False
        elif fault.what == REACHED:
            os.write(int(fault.to), b"!")
        elif fault.what in SIGNALS:
            os.kill(os.getpid(), getattr(signal, fault.what))
        elif fault.what in ERRORS:
            _fail(fault.what, what, path)
        elif half is not None:
            count: int = half()
            if fault.what == "torn-SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.what == "torn-ENOSPC":
                _fail("ENOSPC", what, path)
            return count
        return None

    def _watched(
        self,
        file: Any,
        mode: str,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """A file whose writes are counted."""
        shim = self

        class Counted(io.FileIO):
            def write(self, data: Any) -> int:
                half = memoryview(data).cast("B")[: (len(memoryview(data).cast("B")) + 1) // 2]
                given = shim._reach("write", shim._of(file), lambda: super(Counted, self).write(half))
                return super().write(data) if given is None else given

        raw = Counted(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


def mount(place: Path, size: int, *what: str, options: str = "") -> None:
    """Mount a disk of so many bytes, or change how many it has."""
    subprocess.run(["mount", "-o", f"{options}size={size}", *what, str(place)], check=True, capture_output=True)


def disturb(path: Path, how: str) -> None:
    """Do to a file what another process might."""
    if how == "deleted":
        path.unlink(missing_ok=True)
        return
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    else:
        # The low half of a float's exponent and the case of a letter: still a model, still text.
        for place in range(len(data) // 2, len(data)):
            data[place] ^= 0x20 if data[place] not in b'{}[]":,' else 0
    with io.FileIO(path, "r+") as file:
        file.truncate(len(data))
        file.write(data)


def _fail(name: str, what: str, path: str) -> NoReturn:
    number = getattr(errno, name)
    # The system names no file where it was given a descriptor.
    raise OSError(number, os.strerror(number), *([] if what in ("write", "sync", "claim") else [path]))
