"""Processes that each hold one model and run it on demand.

Nothing heavy is imported here, so that a new process soon ignores Ctrl-C and catches its errors.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ckpt_prune.benchmarking.participants import Loaded, Memory, Participant, Timing
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.memory import peak_bytes, resident_bytes

if TYPE_CHECKING:  # it imports torch
    from ckpt_prune.benchmarking.workload import Workload

_PATIENCE = 5.0
"""Seconds that a process gets to end by itself."""
_WAITING = "OMP_WAIT_POLICY"
"""OpenMP reads it once, when torch is imported."""
_SAFE_PATH = "PYTHONSAFEPATH"
"""Python then imports nothing from the folder that it is started in."""


def serve(connection: Connection, participant: Participant) -> None:
    """Load a model and time it on every workload that comes, until None comes or the other end is closed.

    Sends `Loaded`, then a `Timing` per workload, then `Memory`; a UserError in place of any of them ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the parent ends this
    warnings.simplefilter("ignore")
    with contextlib.suppress(OSError):  # standard error may be closed
        os.dup2(2, 1)  # standard output is the parent's, which may be writing JSON
    try:
        from ckpt_prune.benchmarking.runners import load_runner

        base = resident_bytes()
        runner = load_runner(participant)
        connection.send(Loaded(runner.device, runner.note))
        while (workload := connection.recv()) is not None:
            connection.send(runner.time(workload))
        connection.send(Memory(base, peak_bytes(), runner.gpu_memory()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception as error:  # loaders and runtimes raise anything
        connection.send(UserError(_describe(error)))


def _describe(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    name = type(error).__name__
    kind = "out of memory" if name in ("MemoryError", "OutOfMemoryError") else name
    return f"{kind}: {one_line(error)}" if str(error).strip() else kind


Serve = Callable[[Connection, Participant], None]


class Worker:
    """The parent's side of a process. Every method raises UserError if the process fails or dies."""

    def __init__(self, participant: Participant, target: Serve = serve) -> None:
        self.participant = participant
        # Spawned, not forked: its memory is its own, and it is the same on every system.
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=target, args=(child_end, participant), daemon=True)
        try:
            with _prepared_for_children():
                self._process.start()
        finally:
            child_end.close()  # so that the end of the process is the end of the pipe

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def wait_until_loaded(self) -> Loaded:
        loaded: Loaded = self._receive()
        return loaded

    def time(self, workload: "Workload") -> Timing:
        self._send(workload)
        timing: Timing = self._receive()
        return timing

    def finish(self) -> Memory:
        """Let the process end, and return the memory that it took."""
        self._send(None)
        memory: Memory = self._receive()
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
            self._receive()  # the process is gone; perhaps it said why
            raise self._make_death_error() from None

    def _receive(self) -> Any:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            raise self._make_death_error() from None
        if isinstance(message, UserError):
            raise UserError(f"{self.participant}: {message}")
        return message

    def _make_death_error(self) -> UserError:
        self._process.join(_PATIENCE)
        return UserError(f"{self.participant}: its process {_describe_exit(self._process.exitcode)}")


def _describe_exit(code: int | None) -> str:
    """Put an exit code of `multiprocessing` into words. A negative one is the number of a signal."""
    if code is None:
        return "hung up"
    if code >= 0:
        return f"ended with code {code}"
    if code == -9:  # SIGKILL, which Windows has no name for
        return "was killed, as systems do if memory runs out"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was ended by signal {-code}"


@contextlib.contextmanager
def start_workers(participants: Sequence[Participant], target: Serve = serve) -> Iterator[list[Worker]]:
    """Start a process for each, all together; none is left afterwards, however it ends."""
    workers: list[Worker] = []
    try:
        for participant in participants:
            workers.append(Worker(participant, target))  # noqa: PERF401 - those that run must be known if one fails
        yield workers
    finally:
        for worker in workers:
            worker.stop()


@contextlib.contextmanager
def _prepared_for_children() -> Iterator[None]:
    """Let processes that start meanwhile ignore Ctrl-C, and their threads sleep while they wait.

    A spawned process imports the script that called this tool, and perhaps torch with it, before `serve` runs: its
    threads would keep a core from the model that is timed next.
    """
    handler: Any = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = dict(os.environ)
    os.environ.setdefault(_WAITING, "PASSIVE")
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        for name in {_WAITING, _SAFE_PATH} - before.keys():
            del os.environ[name]
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
