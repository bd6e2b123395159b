"""A graph in a process of its own, with limits on time and memory: a stranger's graph is a program.

Nothing heavy is imported before the process needs it: it takes a third of a second.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from ckpt_prune.common.child_process import end_with, import_path, safe_environment
from ckpt_prune.common.errors import one_line

MOST_BYTES = 2**33
"""Memory that a graph may take, beside four times its weights."""
SECONDS = 20.0
"""Time that the smallest graph may take to be loaded, or for one input."""
_PER_SECOND, _IMAGE = 1e9, 1000
"""Multiplications that any machine does in a second, and positions that an image counts as."""
_CHILD = """
import sys
sys.path[:] = {path!r}
from multiprocessing.connection import Connection
from ckpt_prune.onnx.isolation import serve
serve(Connection({descriptor}))
"""
_CLOSED = (EOFError, OSError)


@dataclass(frozen=True)
class Slot:
    """An input or output, as onnxruntime describes it."""

    name: str
    type: str
    shape: list[Any]


class IsolatedSession:
    """The methods of onnxruntime's InferenceSession that this package uses, in another process.

    Raises RuntimeError if the graph cannot be loaded or run, or not within the limits.
    """

    def __init__(self, graph: Path, threads: int, providers: Sequence[Any], mapped: bool = False) -> None:
        self._weights = sum(path.stat().st_size for path in graph.parent.glob(f"{graph.name}*"))
        on_cpu = len(providers) == 1  # a GPU's driver maps many times what it uses
        limit = MOST_BYTES + 4 * self._weights if on_cpu else None
        self._connection, child_end = Pipe()
        # Not by `multiprocessing`, which would run a caller's script again. Ctrl-C does not reach another session.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD.format(path=import_path(), descriptor=child_end.fileno())],
            env=safe_environment(),
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        child_end.close()
        # A process that begins on a busy machine takes its time.
        request = (str(graph), threads, list(providers), mapped, limit, os.getpid())
        try:
            loaded: tuple[list[Slot], list[Slot], list[str]] = self._ask(request, 3 * SECONDS + self._weights // 2**24)
        except RuntimeError:
            self.close()
            raise
        self._inputs, self._outputs, self._providers = loaded

    def get_inputs(self) -> list[Slot]:
        return self._inputs

    def get_outputs(self) -> list[Slot]:
        return self._outputs

    def get_providers(self) -> list[str]:
        return self._providers

    def run(self, _names: None, arrays: Mapping[str, Any]) -> list[Any]:
        tokens = [array.size for array in arrays.values() if array.dtype.kind == "i"]
        positions = max(tokens) if tokens else _IMAGE * max(len(array) for array in arrays.values())
        outputs: list[Any] = self._ask(dict(arrays), SECONDS + round(self._weights * positions / _PER_SECOND))
        return outputs

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _ask(self, request: Any, seconds: float) -> Any:
        with suppress(*_CLOSED):  # reading the answer says why
            self._connection.send(request)
        try:
            if not self._connection.poll(seconds):
                self.close()
                raise RuntimeError(f"it did not end within {seconds:g} s")
            answer = self._connection.recv()
        except _CLOSED as error:
            self._process.kill()
            raise RuntimeError(f"its process ended with code {self._process.wait()}") from error
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


_open_sessions: ContextVar[list[IsolatedSession] | None] = ContextVar("_open_sessions", default=None)


@contextmanager
def isolate_sessions() -> Iterator[None]:
    """Open graphs in processes of their own meanwhile (on POSIX); they end with it."""
    sessions: list[IsolatedSession] = []
    token = _open_sessions.set(sessions)
    try:
        yield
    finally:
        _open_sessions.reset(token)
        for session in sessions:
            session.close()


def create_session(graph: Path, threads: int, providers: Sequence[Any], *, mapped: bool = False) -> Any:
    """An InferenceSession, or inside `isolate_sessions` one in another process; raises any exception.

    Args:
        mapped: let onnxruntime map weights in the graph's own file, too, as it does with those that lie beside it. By
            default it reads the whole file, and holds large weights twice until it has loaded it. It computes the same.
    """
    sessions = _open_sessions.get()
    if sessions is None or os.name != "posix":
        return _create_session(graph, threads, providers, mapped)
    sessions.append(IsolatedSession(graph, threads, providers, mapped))
    return sessions[-1]


def _create_session(graph: Path, threads: int, providers: Sequence[Any], mapped: bool, severity: int = 3) -> Any:
    import onnxruntime

    from ckpt_prune.onnx.structure import refer_to_weights

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = severity
    # Threads that spin while they wait take the cores from whoever else computes (measured: PyTorch beside it 1.7 times
    # slower); alone on the machine it costs 0 to 6 %.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if mapped:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
    onnxruntime.set_default_logger_severity(4)
    try:
        model = refer_to_weights(graph) if mapped else str(graph)
        # Its own way back to other providers prints on stdout and does not say what it runs on.
        return onnxruntime.InferenceSession(model, options, providers=providers, enable_fallback=0)
    finally:
        onnxruntime.set_default_logger_severity(2)


def serve(connection: Connection) -> None:
    """The process: load a graph, then run it on whatever comes. An answer that is a text is a failure."""
    try:
        graph, threads, providers, mapped, limit, parent = connection.recv()
        end_with(parent)
        _limit_memory(limit)
        # It logs nothing: what goes wrong is in the answer.
        session = _create_session(Path(graph), threads, providers, mapped, severity=4)
        ports = (session.get_inputs(), session.get_outputs())
        slots = [[Slot(port.name, port.type, port.shape) for port in own] for own in ports]
        connection.send((*slots, session.get_providers()))
        while True:
            feed = connection.recv()
            try:
                answer = session.run(None, feed)
            except Exception as error:
                answer = one_line(error)
            connection.send(answer)
    except _CLOSED:
        return  # the parent is gone
    except Exception as error:  # onnxruntime's exceptions share no base class
        connection.send(one_line(error))


def _limit_memory(most: int | None) -> None:
    """Let this process take no more memory than that, if the system has such limits."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        if most is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            limit = pages * resource.getpagesize() + most
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
