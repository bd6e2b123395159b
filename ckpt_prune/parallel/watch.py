"""How a process learns that another one has ended, and makes its own end known.

Every process leaves a sign of life in torchrun's store twice a second. One that fails says so there first; one that is
killed leaves no more signs. A thread looks, so that a process hears of it in the middle of its work.
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
from typing import TYPE_CHECKING

from ckpt_prune.common.safe_text import to_one_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

EVERY = 0.5
"""Seconds between two signs of life."""
SILENT = 60.0
"""Seconds without a sign of life after which a process counts as dead. This is for machines that vanish: a process that
is killed is found at once, since its connections close and torchrun stops the others."""
GRACE = 10.0
"""Seconds that a process has to end by itself once another one has ended."""
_ENDED, _TOLD = "ended", "told"


@dataclass(frozen=True)
class End:
    """Rank and message of the first process that failed. Rank -1 stands for torchrun."""

    rank: int
    message: str


class Watch:
    """Gives this process's signs of life, and looks for those of the others.

    Args:
        name: returns the name of a process for messages.
        stop: makes the main thread of this process end.
        leave: ends this process at once, if it did not end by itself.

    Attributes:
        end: of another process that failed; None while none has.
    """

    def __init__(
        self,
        store: "Store",
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
        self._stop, self._exit, self._every = stop, leave, every
        self._clock, self._pause = clock, pause
        self._signs = 0
        self._closing = threading.Event()
        self.end: End | None = None
        self._sign()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop looking, since this process is at its end."""
        self._closing.set()

    def fail(self, message: str) -> bool:
        """Tell the others why this process ends. Returns whether it is the first to fail."""
        end = json.dumps([self._rank, message])
        return self._store.compare_set(_ENDED, "", end).decode() == end

    def leave(self) -> None:
        """Tell the others that this process was stopped, so that it is not missed."""
        self._store.set(f"left/{self._rank}", "1")

    def tell(self) -> None:
        """Record that the user has been told."""
        self._store.set(_TOLD, "1")

    def wait_told(self, seconds: float) -> bool:
        """Wait until the first process has told the user; False if it does not within some seconds."""
        return self._wait_for(lambda: self._store.check([_TOLD]), seconds)

    def missing(self, seconds: float) -> list[int]:
        """Return the ranks of processes that give no sign of life for some seconds and have not left."""
        before = self._others_signs()
        silent: list[int] = []

        def have_all_signed() -> bool:
            now = self._others_signs()
            silent[:] = [
                rank for rank in before if now[rank] == before[rank] and not self._store.check([f"left/{rank}"])
            ]
            return not silent

        self._wait_for(have_all_signed, seconds)
        return silent

    def _wait_for(self, is_done: Callable[[], bool], seconds: float) -> bool:
        until = self._clock() + seconds
        while not is_done():
            if self._clock() > until:
                return False
            self._pause(self._every / 5)
        return True

    def heard(self) -> End | None:
        """Return the end of another process that failed, by what the store says now."""
        if self.end is None and self._store.check([_ENDED]):
            rank, message = json.loads(self._store.get(_ENDED))
            self.end = End(rank, message) if rank != self._rank else None
        return self.end

    def _others_signs(self) -> dict[int, bytes]:
        return {rank: self._store.get(f"alive/{rank}") for rank in range(self._size) if rank != self._rank}

    def _sign(self) -> None:
        self._signs += 1
        self._store.set(f"alive/{self._rank}", str(self._signs))

    def _look(self) -> None:
        signs = self._others_signs() if self._rank == 0 else {}
        times = dict.fromkeys(signs, time.monotonic())
        while not self._closing.wait(self._every):
            try:
                self._sign()
                if self._rank == 0:
                    self._look_for_silent(signs, times)
                ended = self.heard() is not None
            except Exception:  # torch's own kinds: torchrun, which keeps the store, is gone
                self.end, ended = End(-1, "torchrun has ended"), True
            if ended and not self._closing.is_set():
                self._stop()
                # A main thread that computes for minutes at a stretch does not hear that.
                if not self._closing.wait(GRACE):
                    if self._rank == 0 and self.end is not None:
                        line = to_one_line(describe_end(self.end, self._name))
                        print(f"Error: {line}", file=sys.stderr, flush=True)
                    self._exit(2)
                return

    def _look_for_silent(self, signs: dict[int, bytes], times: dict[int, float]) -> None:
        now = time.monotonic()
        for rank, sign in self._others_signs().items():
            if sign != signs[rank]:
                signs[rank], times[rank] = sign, now
            elif now - times[rank] > SILENT:
                self.end = self.end or End(rank, f"gave no sign of life for {SILENT:.0f} seconds")
                self._store.compare_set(_ENDED, "", json.dumps([rank, self.end.message]))


def describe_end(end: End, name: Callable[[int], str]) -> str:
    """Return the message for the user about a process that failed."""
    return end.message if end.rank < 0 else f"{name(end.rank)}: {end.message}"
