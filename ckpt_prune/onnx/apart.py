"""A graph in a process of its own, with limits on time and memory: what strangers' graphs compute, nobody vouches for.

Nothing heavy is imported before the process needs it: it takes a third of a second.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

MOST_BYTES = 2**33
"""Of memory that a graph may take, beside four times its weights."""
SECONDS = 20.0
"""That the least graph may take to be loaded, or for one input."""
_PER_SECOND, _IMAGE = 1e9, 1000
"""Multiplications that any machine does in a second, and positions that an image counts as."""
_CHILD = """
import sys
sys.path[:] = {path!r}
from multiprocessing.connection import Connection
from ckpt_prune.onnx.apart import serve
serve(Connection({descriptor}))
"""
_GONE = (EOFError, OSError)


@dataclass(frozen=True)
class Slot:
    """An input or output, as onnxruntime describes it."""

    name: str
    type: str
    shape: list[Any]


class SessionApart:
    """What of onnxruntime's InferenceSession is used here, in another process.

    Args:
        graph: the file.
        threads: of one operator.
        providers: to run it on.

    Raises:
        RuntimeError: it cannot be loaded, or not within the limits.
    """

    def __init__(self, graph: Path, threads: int, providers: Sequence[Any]) -> None:
        self._weights = sum(path.stat().st_size for path in graph.parent.glob(f"{graph.name}*"))
        on_cpu = len(providers) == 1  # what drives a GPU maps many times what it uses
        most = MOST_BYTES + 4 * self._weights if on_cpu else None
        self._connection, theirs = Pipe()
        # Not by `multiprocessing`, which would run a caller's script again. In a session of its own, Ctrl-C is not its.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=sys.path, descriptor=theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        with suppress(*_GONE):  # the answer says why
            self._connection.send((str(graph), threads, list(providers), most, os.getpid()))
        # A process that begins on a busy machine takes its time.
        try:
            found: tuple[list[Slot], list[Slot], list[str]] = self._answer(3 * SECONDS + round(self._weights / 2**24))
        except RuntimeError:
            self.close()
            raise
        self._inputs, self._outputs, self._providers = found

    def get_inputs(self) -> list[Slot]:
        """In the graph's order."""
        return self._inputs

    def get_outputs(self) -> list[Slot]:
        """In the graph's order."""
        return self._outputs

    def get_providers(self) -> list[str]:
        """What it runs on."""
        return self._providers

    def run(self, _names: None, arrays: Mapping[str, Any]) -> list[Any]:
        """All outputs for these inputs.

        Raises:
            RuntimeError: it fails, or not within the limits.
        """
        with suppress(*_GONE):  # the answer says why
            self._connection.send(dict(arrays))
        tokens = [each.size for each in arrays.values() if each.dtype.kind == "i"]
        positions = max(tokens) if tokens else _IMAGE * max(len(each) for each in arrays.values())
        found: list[Any] = self._answer(SECONDS + round(self._weights * positions / _PER_SECOND))
        return found

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _answer(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                self.close()
                raise RuntimeError(f"it did not end within {seconds:g} s")
            found = self._connection.recv()
        except _GONE as error:
            self._process.kill()
            raise RuntimeError(f"its process ended with code {self._process.wait()}") from error
        if isinstance(found, str):
            raise RuntimeError(found)
        return found


_open: ContextVar[list[SessionApart] | None] = ContextVar("_open", default=None)


@contextmanager
def sessions_apart() -> Iterator[None]:
    """Graphs that are opened meanwhile are in processes of their own, which end with it."""
    opened: list[SessionApart] = []
    token = _open.set(opened)
    try:
        yield
    finally:
        _open.reset(token)
        for each in opened:
            each.close()


def new_session(graph: Path, threads: int, providers: Sequence[Any]) -> Any:
    """An InferenceSession, or one apart.

    Args:
        graph: the file.
        threads: of one operator.
        providers: to run it on.

    Raises:
        Exception: of any kind, where it does not load.
    """
    opened = _open.get()
    if opened is None or os.name != "posix":
        return _session(graph, threads, providers)
    opened.append(SessionApart(graph, threads, providers))
    return opened[-1]


def _session(graph: Path | str, threads: int, providers: Sequence[Any], severity: int = 3) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = severity
    # Threads that spin while they wait take the cores from whoever else computes (measured: PyTorch beside it 1.7 times
    # slower); alone on the machine it costs 0 to 6 %.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    onnxruntime.set_default_logger_severity(4)
    try:
        # Its own way back to other providers prints on stdout and keeps quiet about what it runs on.
        return onnxruntime.InferenceSession(str(graph), options, providers=providers, enable_fallback=0)
    finally:
        onnxruntime.set_default_logger_severity(2)


def serve(connection: Connection) -> None:
    """What the process does: loads a graph, then runs it on whatever comes; a text in place of an answer is a failure.

    Args:
        connection: to the parent. Where its other end is closed, the process ends.
    """
    try:
        graph, threads, providers, most, parent = connection.recv()
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        _limit(most)
        session = _session(graph, threads, providers, severity=4)  # what goes wrong is in the answer
        ports = [[Slot(each.name, each.type, each.shape) for each in own] for own in _slots(session)]
        connection.send((*ports, session.get_providers()))
        while True:
            feed = connection.recv()
            try:
                answer = session.run(None, feed)
            except Exception as error:
                answer = _reason(error)
            connection.send(answer)
    except _GONE:
        return
    except Exception as error:  # onnxruntime's exceptions share no base class
        connection.send(_reason(error))


def _end_with(parent: int) -> None:
    """A graph that never ends does not outlive who waits for it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _slots(session: Any) -> tuple[list[Any], list[Any]]:
    return session.get_inputs(), session.get_outputs()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _limit(most: int | None) -> None:
    """Let this process take no more memory than that; where the system has such limits."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        if most is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            limit = pages * resource.getpagesize() + most
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
