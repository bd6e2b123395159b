"""Seconds of the phases of pruning, which take turns within a stage. The clock runs for one phase at a time."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["calibration", "gradients", "effects", "ranking", "compensation"]
"""Running and measuring the model; passing gradients back through it; trying what whole sites or spaces do to its
output; scoring and choosing units; solving for the kept weights."""


@dataclass(frozen=True)
class Lap:
    """Seconds of one block, and of each phase in it. The rest is reading and writing."""

    block: int
    seconds: float
    phases: Mapping[Phase, float]


class PhaseClock:
    """Adds up the seconds of each phase.

    Attributes:
        seconds: so far, of each phase that has begun.
        laps: of each block that was worked on by itself.
    """

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {}
        self.laps: list[Lap] = []
        self._running: Phase | None = None
        self._since = 0.0

    def switch(self, phase: Phase | None) -> Phase | None:
        """Let the clock run for another phase, or stop it with None. Returns the phase before."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        now, before = time.perf_counter(), self._running
        if before is not None:
            self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._running, self._since = phase, now
        return before


_clock: ContextVar[PhaseClock | None] = ContextVar("phase clock", default=None)


@contextmanager
def time_phases() -> Iterator[PhaseClock]:
    clock = PhaseClock()
    token = _clock.set(clock)
    try:
        yield clock
    finally:
        _clock.reset(token)


@contextmanager
def time_block(block: int) -> Iterator[None]:
    """Count the seconds of the body, which works on one block, as a lap of the clock."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    start, before = time.perf_counter(), dict(clock.seconds)
    yield
    phases = {name: now - before.get(name, 0.0) for name, now in clock.seconds.items() if now > before.get(name, 0.0)}
    clock.laps.append(Lap(block, time.perf_counter() - start, phases))


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Count the seconds of the body, or of a decorated function, for a phase and not for the one around it."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    before = clock.switch(name)
    try:
        yield
    finally:
        clock.switch(before)
