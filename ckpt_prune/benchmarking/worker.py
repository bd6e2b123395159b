"""A process that holds one model and runs it when it is told to.

Nothing heavy is imported before the first lines of `serve`, so that Ctrl-C is ignored and errors are caught early.
"""

import contextlib
import os
import signal
import warnings
from multiprocessing.connection import Connection

from ckpt_prune.benchmarking.messages import Failure, Memory, Ready, Seat
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.memory import peak_bytes, resident_bytes


def serve(connection: Connection, seat: Seat) -> None:
    """Load a model and time it on every workload that comes; None ends it.

    Sent: `Ready`, a `Timing` per workload, `Memory` at the end; or `Failure` in place of any of them.

    Args:
        connection: to the parent. Where its other end is closed, the process ends.
        seat: what to run.
    """
    # Ctrl-C reaches every process of the terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    with contextlib.suppress(OSError):  # where standard error is closed
        os.dup2(2, 1)  # standard output is the parent's, which may be writing JSON
    try:
        _serve(connection, seat)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception as error:  # loaders and runtimes raise anything
        connection.send(Failure(_reason(error)))


def _serve(connection: Connection, seat: Seat) -> None:
    from ckpt_prune.benchmarking.runners import RUNNERS

    base = resident_bytes()
    runner = RUNNERS[seat.runtime](seat)
    connection.send(Ready(runner.device, runner.note))
    while (workload := connection.recv()) is not None:
        connection.send(runner.time(workload))
    connection.send(Memory(base, peak_bytes(), runner.gpu_memory()))


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    said = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({said})" if said else "out of memory"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
