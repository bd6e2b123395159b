"""How a process hears that another one has ended, and makes its own end known.

Every process leaves a sign of life in the store that torchrun keeps, every half second. One that fails says so there
before it goes; one that is killed leaves no more signs. A thread looks, so that a process hears of it at its work.
"""

import _thread
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ckpt_prune.common.safe_text import to_one_line

EVERY = 0.5
"""Seconds between two signs of life."""
SILENT = 60.0
"""Seconds without a sign of life after which a process counts as dead. One that is killed is found at once: its
connections close, and torchrun stops the others. This is for machines that vanish."""
GRACE = 10.0
"""Seconds that a process has to end by itself once another one has ended."""
_ENDED, _TOLD = "ended", "told"


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Enter a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value of a key; waits until there is one."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them have values."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Enter a value where there is none as yet; what stands there then."""
        ...


@dataclass(frozen=True)
class End:
    """How the first process that failed did.

    Attributes:
        rank: which it was.
        message: what it had to say.
    """

    rank: int
    message: str


class Watch:
    """Signs of life of this process, and those of the others.

    Args:
        store: that all processes share.
        rank: of this one.
        size: how many there are.
        name: what a process is called.
        stop: makes the main thread of this process end.
        leave: ends this process at once, where it did not by itself.
        every: seconds between two signs.
        clock: tells the time to whoever waits for the others.
        pause: lets so many seconds pass.

    Attributes:
        end: how another process failed; None while none has.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        name: Callable[[int], str],
        *,
        stop: Callable[[], object] = lambda: _thread.interrupt_main(signal.SIGTERM),
        leave: Callable[[int], object] = os._exit,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._rank, self._size, self._name = store, rank, size, name
        self._stop, self._leave, self._every = stop, leave, every
        self._clock, self._pause = clock, pause
        self._signs = 0
        self._closing = threading.Event()
        self.end: End | None = None
        self._sign()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def begin(self) -> None:
        """Start to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more: this process is at its end."""
        self._closing.set()

    def fail(self, message: str) -> bool:
        """Tell the others why this process ends.

        Returns:
            Whether it is the first to say so.
        """
        own = json.dumps([self._rank, message])
        return self._store.compare_set(_ENDED, "", own).decode() == own

    def went(self) -> None:
        """Note that this process ends by a signal: it is not to be missed."""
        self._store.set(_left(self._rank), "1")

    def told(self) -> None:
        """Note that the user has been told."""
        self._store.set(_TOLD, "1")

    def wait_told(self, seconds: float) -> bool:
        """Whether the first process tells the user within some seconds."""
        until = self._clock() + seconds
        while not self._store.check([_TOLD]):
            if self._clock() > until:
                return False
            self._pause(self._every / 5)
        return True

    def missing(self, seconds: float) -> list[int]:
        """Processes that give no sign of life within some seconds, and have not said that they end."""
        before = self._all_signs()
        until = self._clock() + seconds
        while True:
            now = self._all_signs()
            silent = [rank for rank in before if now[rank] == before[rank] and not self._has_left(rank)]
            if not silent or self._clock() > until:
                return silent
            self._pause(self._every / 5)

    def heard(self) -> End | None:
        """How another process failed, as the store has it now."""
        if self.end is None and self._store.check([_ENDED]):
            rank, message = json.loads(self._store.get(_ENDED))
            self.end = End(rank, message) if rank != self._rank else None
        return self.end

    def _has_left(self, rank: int) -> bool:
        return self._store.check([_left(rank)])

    def _all_signs(self) -> dict[int, bytes]:
        return {rank: self._store.get(_alive(rank)) for rank in range(self._size) if rank != self._rank}

    def _sign(self) -> None:
        self._signs += 1
        self._store.set(_alive(self._rank), str(self._signs))

    def _look(self) -> None:
        seen = self._all_signs() if self._rank == 0 else {}
        when = dict.fromkeys(seen, time.monotonic())
        while not self._closing.wait(self._every):
            try:
                self._sign()
                if self._rank == 0:
                    self._look_for_silent(seen, when)
                ended = self.heard() is not None
            except Exception:  # torch's own kinds: torchrun, which keeps the store, is gone
                self.end, ended = End(-1, "torchrun has ended"), True
            if ended and not self._closing.is_set():
                self._stop()
                # Where it computes for minutes at a stretch, it does not hear that.
                if not self._closing.wait(GRACE):
                    self._say_and_leave()
                return

    def _look_for_silent(self, seen: dict[int, bytes], when: dict[int, float]) -> None:
        now = time.monotonic()
        for rank, sign in self._all_signs().items():
            if sign != seen[rank]:
                seen[rank], when[rank] = sign, now
            elif now - when[rank] > SILENT:
                self.end = self.end or End(rank, f"gave no sign of life for {SILENT:.0f} seconds")
                self._store.compare_set(_ENDED, "", json.dumps([rank, self.end.message]))

    def _say_and_leave(self) -> None:
        if self._rank == 0 and self.end is not None:
            print(f"Error: {to_one_line(describe_end(self.end, self._name))}", file=sys.stderr, flush=True)
        self._leave(2)


def describe_end(end: End, name: Callable[[int], str]) -> str:
    """What the user is told of a process that failed."""
    return end.message if end.rank < 0 else f"{name(end.rank)}: {end.message}"


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"
