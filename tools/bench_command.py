"""A command of the package in a process of its own: what it prints and takes."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True)
class Done:
    """What a command printed and took.

    Attributes:
        printed: on stdout.
        seconds: of processors.
        clock: seconds on the clock.
        peak_bytes: of memory.
    """

    printed: str
    seconds: float
    clock: float
    peak_bytes: int


def command(*arguments: str) -> Done:
    """Run `ckpt-prune` with these arguments.

    Raises:
        RuntimeError: it failed; the end of what it said.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begun = monotonic()
        started = subprocess.Popen([sys.executable, "-m", "ckpt_prune", *arguments], stdout=out, stderr=err)
        _, status, used = os.wait4(started.pid, 0)
        clock = monotonic() - begun
        started.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, err):
            file.seek(0)
        if started.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: exit code {started.returncode}: {err.read()[-2000:]}")
        return Done(out.read(), used.ru_utime + used.ru_stime, clock, 1024 * used.ru_maxrss)
