"""Work in a process of its own that need not import everything anew: for tests of how a process ends."""

import io
import logging
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_prune.common.child_process import python_command

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no such processes and signals")


@dataclass(frozen=True)
class Child:
    """A copy of this process that works."""

    process: int
    files: list[Path]

    def send(self, number: int) -> None:
        """Send a signal to it; it may have ended."""
        os.kill(self.process, number)

    def ended(self, seconds: float | None = None) -> "subprocess.CompletedProcess[str]":
        """Wait for the end and return the result; after `seconds`, if given, the process is killed, which is an error.

        Only campaigns that look for what hangs give a limit: how long a test takes says nothing of the code.
        """
        waited = seconds is None or _ends(self.process, seconds)
        if not waited:
            os.kill(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        outputs = [path.read_text() for path in self.files]
        for path in self.files:
            path.unlink()
        if not waited:
            raise TimeoutError(f"it did not end in {seconds} s; it said {outputs}")
        return subprocess.CompletedProcess([], os.waitstatus_to_exitcode(status), *outputs)


def _ends(process: int, seconds: float) -> bool:
    last = time.monotonic() + seconds
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > last:
            return False
        time.sleep(0.005)
    return True


def wait_gone(process: int) -> None:
    """Wait until a process has ended, which need not be a child of this one."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("this system does not tell when another process ends")
    try:
        ending = os.pidfd_open(process)
    except ProcessLookupError:
        return
    select.select([ending], [], [])
    os.close(ending)


def begin(work: Callable[[], None], place: Path) -> Child:
    """Begin `work` in a copy of this process; nothing that it does to itself is seen here.

    Args:
        work: its SystemExit is the process's status, as at the end of a program; after any other error it is 1.
        place: a folder for what it prints while it runs.
    """
    files = [place / name for name in (".stdout", ".stderr")]
    for path in files:
        path.write_bytes(b"")
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads: xdist has one, which does not work while a test does.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        work_and_exit(work, files)
    return Child(process, files)


def run_forked(work: Callable[[], None], place: Path) -> "subprocess.CompletedProcess[str]":
    """Run `work` as `begin` does, to its end."""
    return begin(work, place).ended()


def fork_module(patch: pytest.MonkeyPatch, module: Any, place: Path) -> None:
    """Let a module that runs itself in a new Python do so in a copy of this process, which has imported what it needs.

    Args:
        patch: undoes it.
        module: runs itself by `python_command`, and gives its arguments to `_main`.
        place: a folder for what the copy prints.
    """

    def run(command: list[str], *, stderr: Any = None, text: bool = False, **_: Any) -> Any:
        runs, given = command[:4], command[4:]
        assert runs == python_command(module.__name__)

        def work() -> None:
            with warnings.catch_warnings(action="ignore"):  # a new Python would not take them for errors
                module._main(*given[:-1], Path(given[-1]))

        done = run_forked(work, place)
        if stderr is subprocess.STDOUT:
            done = subprocess.CompletedProcess([], done.returncode, done.stdout + done.stderr, "")
        if not text:
            done = subprocess.CompletedProcess([], done.returncode, done.stdout.encode(), done.stderr.encode())
        return done

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    patch.setattr(module, "subprocess", SimpleNamespace(run=run, **names))


def work_and_exit(work: Callable[[], None], files: list[Path]) -> None:
    """Work in a copy of this process, which prints to files and never returns."""
    status = 1
    try:
        for descriptor, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), write_through=True) for number in (1, 2))
        # Libraries took the stream that there was when they were imported.
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                    handler.stream = sys.stderr  # what it had may be closed
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
