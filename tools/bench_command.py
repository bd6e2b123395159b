"""A command of the package in a process of its own: what it prints and takes."""

import re
import resource
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any


@dataclass(frozen=True)
class Done:
    """The output, time and memory of a command.

    Attributes:
        printed: on stdout.
        seconds: of processors.
        clock: seconds on the clock.
        gibibytes: peak resident memory.
    """

    printed: str
    seconds: float
    clock: float
    gibibytes: float


def command(*arguments: str | Path, ends: Collection[int] = (0,)) -> Done:
    """Run `ckpt-prune` with these arguments.

    By way of `peak_rss.py`: a process started from here would count this one's memory as its own.

    Args:
        arguments: of the command.
        ends: exit codes that are as good as any.

    Raises:
        RuntimeError: it ends with another one; the end of what it said.
    """
    words = [str(argument) for argument in arguments]
    start = Path(__file__).with_name("peak_rss.py"), sys.executable, "-m", "ckpt_prune"
    begun, before = monotonic(), _of_processors()
    done = subprocess.run([sys.executable, *map(str, start), *words], capture_output=True, text=True, check=False)
    clock, seconds = monotonic() - begun, _of_processors() - before
    peak = re.search(r"peak RSS ([0-9.]+) GiB", done.stderr)
    if done.returncode not in ends or peak is None:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return Done(done.stdout, seconds, clock, float(peak[1]))


def _of_processors() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def as_options(values: Mapping[str, Any]) -> list[str]:
    """Options of a command, by their long names."""
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]
