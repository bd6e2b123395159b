"""Work in a process of its own that need not import everything anew: for tests of how a process ends."""

import io
import logging
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no such processes and signals")


def forked(work: Callable[[], None], place: Path) -> "subprocess.CompletedProcess[str]":
    """Run `work` in a copy of this process; nothing that it does to itself is seen here.

    Args:
        work: its SystemExit is the process's status, as at the end of a program; after any other error it is 1.
        place: a folder for what it prints while it runs.
    """
    files = [place / name for name in (".stdout", ".stderr")]
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads: xdist has one, which does not work while a test does.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        work_and_exit(work, files)
    _, status = os.waitpid(process, 0)
    said = [path.read_text() for path in files]
    for path in files:
        path.unlink()
    return subprocess.CompletedProcess([], os.waitstatus_to_exitcode(status), *said)


def work_and_exit(work: Callable[[], None], files: list[Path]) -> None:
    """What a copy of this process does: it works, prints to files, and never returns."""
    status = 1
    try:
        for descriptor, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), write_through=True) for number in (1, 2))
        # Libraries took the stream that there was when they were imported.
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                    handler.setStream(sys.stderr)
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
