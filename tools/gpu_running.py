"""Steps of a measurement, each isolated: a step that fails, dies or takes too long is recorded, and the next one runs.

Steps run in processes that stay: one for each device, so that libraries and kernels are loaded once. After a failed
step on a GPU its process is replaced, since errors of CUDA stick to a process.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

Device = Literal["cpu", "cuda"]
Status = Literal["ok", "failed", "skipped", "left out"]
RESERVE = 5
"""Seconds of the limit that are kept for writing down what was found."""


class SkippedError(Exception):
    """Raised by a step that cannot be made here; its text says why."""


@dataclass(frozen=True)
class Step:
    """One measurement.

    Attributes:
        name: what is done, without the device.
        function: "module:function"; it gives what is recorded of it as JSON has it.
        arguments: of the function, by name.
        device: in whose process it runs.
        after: labels of steps that have to come out before.
        skip: why it is not made, or None.
        least: left out where fewer seconds remain.
        most: stopped after so many seconds.
    """

    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    device: Device = "cpu"
    after: tuple[str, ...] = ()
    skip: str | None = None
    least: float = 5
    most: float = 120

    @property
    def label(self) -> str:
        """The name with the device: no two steps share one."""
        return f"{self.name}, {self.device}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step.

    Attributes:
        name, device: of the step.
        status: "skipped" where this machine or an earlier step rules it out, "left out" where time did.
        reason: why it did not come out, in one line.
        traceback: of a failed step.
        seconds: wall time; the GPU has finished.
        rss_bytes: largest resident memory of the process during the step; from its start where the system keeps no
            other (`rss_from_start`).
        gpu_bytes: largest memory allocated on the GPU during the step, with what earlier steps left there (`gpu_held`).
        values: what the step says.
    """

    name: str
    device: str
    status: Status
    reason: str | None = None
    traceback: str | None = None
    seconds: float | None = None
    rss_bytes: int | None = None
    rss_from_start: bool | None = None
    gpu_bytes: int | None = None
    gpu_held: int | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """Return it for JSON, without keys that have no value."""
        return {key: value for key, value in asdict(self).items() if value not in (None, {})}


class Workers:
    """A process for each device, started when it is first needed and stopped at the end.

    Args:
        log: file that takes what steps print.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._running: dict[str, tuple[Any, Connection]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for device in list(self._running):
            self._stop(device, patience=10)

    def do(self, step: Step, seconds: float) -> Outcome:
        """Make a step, for so many seconds at most."""
        process, connection = self._running.get(step.device) or self._start(step.device)
        try:
            connection.send(step)
            if not connection.poll(seconds):
                self._stop(step.device)
                return Outcome(step.name, step.device, "failed", f"stopped after {seconds:.0f} s", seconds=seconds)
            outcome: Outcome = connection.recv()
        except (EOFError, OSError):
            self._stop(step.device, patience=5)
            return Outcome(step.name, step.device, "failed", f"its process died ({_how(process.exitcode)})")
        if outcome.status == "failed" and step.device == "cuda":
            self._stop(step.device, patience=5)
        return outcome

    def _start(self, device: str) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, str(self._log)), daemon=True)
        process.start()
        theirs.close()
        self._running[device] = process, ours
        return process, ours

    def _stop(self, device: str, patience: float = 0) -> None:
        process, connection = self._running.pop(device)
        connection.close()
        process.join(patience)
        if process.is_alive() and process.pid is not None:
            try:
                # With what it started: the process leads a group of its own once it serves.
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()
        process.join()


def run(
    steps: Sequence[Step],
    do: Callable[[Step, float], Outcome],
    *,
    until: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """The outcome of every step, in order.

    Args:
        steps: to make.
        do: makes one, for so many seconds at most.
        until: when all have to be done, by `clock`.
        clock: returns the time in seconds.
    """
    done: dict[str, Outcome] = {}
    for step in steps:
        missing = [label for label in step.after if label not in done or done[label].status != "ok"]
        remaining = until - RESERVE - clock()
        if step.skip is not None:
            outcome = Outcome(step.name, step.device, "skipped", step.skip)
        elif missing:
            outcome = Outcome(step.name, step.device, "skipped", f"{missing[0]}: did not come out")
        elif remaining < step.least:
            reason = f"{max(0, remaining):.0f} s were left, and it takes {step.least:.0f} or more"
            outcome = Outcome(step.name, step.device, "left out", reason)
        else:
            outcome = do(step, min(step.most, remaining))
        done[step.label] = outcome
        yield outcome


def attempt(step: Step) -> Outcome:
    """Make a step in this process."""
    from ckpt_prune.common.memory import peak_bytes

    try:
        module, _, name = step.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        gpu = _Gpu() if step.device == "cuda" else None
        fresh = _forget_peak()
        start = time.perf_counter()
        values = function(**step.arguments)
        held, largest = gpu.read_end() if gpu else (None, None)
        seconds = round(time.perf_counter() - start, 3)
        return Outcome(
            *(step.name, step.device, "ok", None, None, seconds, peak_bytes(), not fresh, largest, held), values or {}
        )
    except SkippedError as error:
        return Outcome(step.name, step.device, "skipped", str(error))
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
        return Outcome(step.name, step.device, "failed", reason, traceback.format_exc())


class _Gpu:
    """Time and memory of the GPU, from when this is made."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._cuda.init()
        self._cuda.empty_cache()
        self._cuda.synchronize()
        self._cuda.reset_peak_memory_stats()
        self._held = self._cuda.memory_allocated()

    def read_end(self) -> tuple[int, int]:
        """Return the bytes allocated at the start, and the most since."""
        self._cuda.synchronize()
        return self._held, self._cuda.max_memory_allocated()


def _forget_peak() -> bool:
    """Whether Linux starts to count the largest resident memory of this process anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _serve(connection: Connection, log: str) -> None:
    os.setsid()
    with Path(log).open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    while True:
        try:
            step = connection.recv()
        except EOFError:
            return
        print(f"== {step.label}", flush=True)
        connection.send(attempt(step))


def _how(code: int | None) -> str:
    if code is None:
        return "how is not known"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
