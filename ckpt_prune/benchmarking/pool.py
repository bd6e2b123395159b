"""The processes that hold the models, as their parent sees them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

from ckpt_prune.benchmarking.messages import Failure, Memory, Ready, Seat, Timing
from ckpt_prune.benchmarking.worker import serve
from ckpt_prune.common.errors import UserError

if TYPE_CHECKING:  # it imports torch and transformers, which each process does for itself
    from ckpt_prune.benchmarking.workload import Workload

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds that a process gets to end by itself."""

_SIGKILL = -9
"""Windows does not have its name."""

WAITING = "OMP_WAIT_POLICY"
"""What OpenMP reads once, when torch is imported."""

Serve = Callable[[Connection, Seat], None]


class Worker:
    """One process with one model, started at once.

    Args:
        seat: what it runs.
        target: what the process does.
    """

    def __init__(self, seat: Seat, target: Serve = serve) -> None:
        self.seat = seat
        # Spawned, not forked: its memory is its own, and it is the same on every system.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, seat), daemon=True)
        try:
            with _deaf_to_interrupts(), _waiting_passively():
                self._process.start()
        finally:
            theirs.close()  # so that the end of the process is the end of the pipe

    @property
    def pid(self) -> int | None:
        """The exit code of its process."""
        return self._process.pid

    def ready(self) -> Ready:
        """Wait until its model is loaded.

        Raises:
            UserError: it does not load, or the process died; this of all methods.
        """
        return self._receive(Ready)

    def time(self, workload: "Workload") -> Timing:
        """Have it run a workload once."""
        self._send(workload)
        timing: Timing = self._receive(dict)
        return timing

    def finish(self) -> Memory:
        """Have it end, and say what memory it took."""
        self._send(None)
        memory = self._receive(Memory)
        self._process.join(_PATIENCE)
        return memory

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        self._process.close()

    def _send(self, message: "Workload | None") -> None:
        try:
            self._connection.send(message)
        except OSError:
            # It is gone; perhaps it said why.
            self._receive(object)
            raise self._died() from None

    def _receive(self, kind: type[T]) -> T:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(message, Failure):
            raise UserError(f"{self.seat}: {message.reason}")
        assert isinstance(message, kind), message
        return message

    def _died(self) -> UserError:
        self._process.join(_PATIENCE)
        return UserError(f"{self.seat}: its process {how_it_ended(self._process.exitcode)}")


def how_it_ended(code: int | None) -> str:
    """What an exit code of `multiprocessing` means; below 0 it is that of a signal, which Windows has few names for."""
    if code is None:
        return "hung up"
    if code >= 0:
        return f"ended with code {code}"
    if code == _SIGKILL:
        return "was killed, as systems do where memory runs out"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was ended by signal {-code}"


@contextmanager
def workers(seats: Sequence[Seat], target: Serve = serve) -> Iterator[list[Worker]]:
    """A process per seat, all started together; none is left afterwards, however it ends."""
    started: list[Worker] = []
    try:
        for seat in seats:
            started.append(Worker(seat, target))  # noqa: PERF401 - those that run must be known when the next fails
        yield started
    finally:
        for worker in started:
            worker.stop()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started meanwhile ignores Ctrl-C from its first moment; the parent does for these milliseconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _waiting_passively() -> Iterator[None]:
    """Threads of what is started meanwhile sleep while they wait, in place of keeping a core from who is timed next.

    A spawned process imports the script that called this tool before any function of it runs, and perhaps torch with
    it. Its threads learn how to wait then, so that `serve` would say it too late.
    """
    before = os.environ.get(WAITING)
    os.environ.setdefault(WAITING, "PASSIVE")
    try:
        yield
    finally:
        if before is None:
            del os.environ[WAITING]
