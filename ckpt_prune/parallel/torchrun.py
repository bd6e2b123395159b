"""Beginning and end of a command that torchrun has started in several processes."""

import os
import platform
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune._version import __version__
from ckpt_prune.common.errors import UserError
from ckpt_prune.parallel.group import ALONE, Group, working_in
from ckpt_prune.parallel.watch import describe_end

if TYPE_CHECKING:
    from ckpt_prune.parallel.torch_group import TorchGroup

_FAILED = 2
_TELLING = 5.0
"""Seconds that a failed process gives the first one to tell the user why, before it does so itself."""
_SIGNING = 2.0
"""Seconds within which a live process gives a sign of life."""


def is_started_by_torchrun() -> bool:
    """Return whether this process is one of several that torchrun has started."""
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    given = {name: os.environ[name] for name in numbers if name in os.environ}
    if wrong := next((name for name, value in given.items() if not value.isdecimal()), None):
        raise UserError(f"the environment variable {wrong} is {given[wrong]!r}, no number: unset it, or use torchrun")
    return "RANK" in given and int(given.get("WORLD_SIZE", "1")) > 1


def _check_variables() -> None:
    given = os.environ
    if lacking := next((name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in given), None):
        raise UserError(f"RANK and WORLD_SIZE are set, and {lacking} is not: unset both, or use torchrun")
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        raise UserError(f"RANK is {given['RANK']} of WORLD_SIZE {given['WORLD_SIZE']}: unset both, or use torchrun")


@contextmanager
def join_processes() -> Iterator[Group]:
    """Share the work of the body with the other processes that torchrun has started, if it has.

    Only the first one prints. If one fails, all end, and the first one tells which it was and why.

    Raises:
        SystemExit: in other processes than the first, if any failed.
    """
    if not is_started_by_torchrun():
        yield ALONE
        return
    _check_variables()
    from ckpt_prune.parallel.torch_group import TorchGroup

    with _quiet(int(os.environ["RANK"]) > 0):
        group = TorchGroup()
        try:
            with working_in(group):
                group.agree(_versions())
                yield group
        except BaseException as error:
            if getattr(error, "exit_code", None) == 0:  # click's way to end: nothing is wrong
                group.close()
                raise
            message = _account(group, error)
            if not group.first:
                raise SystemExit(_FAILED) from None
            if message is not None:
                raise UserError(message) from error
            raise
        group.close()


def _versions() -> dict[str, str]:
    """Return the versions of programs that must be the same in all processes."""
    versions = {f"version of {name}": version(name) for name in ("torch", "transformers")}
    return {"version of ckpt-prune": __version__, **versions, "version of Python": platform.python_version()}


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


def _account(group: "TorchGroup", error: BaseException) -> str | None:
    """Tell the others that this process ends, and find out what the user should read.

    Returns:
        At the first process, why another one failed or that it died; None if this process's own error says it.
    """
    _ignore_signals()
    watch = group.watch
    watch.close()
    try:
        by_signal = isinstance(error, KeyboardInterrupt)
        is_own_error = not by_signal and _is_own(error)
        if watch.heard() is None and is_own_error:
            watch.fail(_message(error))
        elif by_signal or not is_own_error:
            watch.leave()
        if not group.first:
            if is_own_error and watch.end is None and not watch.wait_told(_TELLING):
                os.write(2, f"Error: {group.name(group.rank)}: {_message(error)}\n".encode())
            return None
        message = None
        if not is_own_error:
            dead = [] if watch.heard() is not None else watch.missing(_SIGNING)
            end = watch.heard()  # a process may have said why while it was waited for
            if end is not None:
                message = describe_end(end, group.name)
            elif dead:
                message = f"{group.name(dead[0])} died without a word: it was killed, or ran out of memory"
        watch.tell()
        return message
    except Exception:  # torch's own kinds: torchrun, which keeps the store, is gone
        return None if watch.end is None else watch.end.message


def _is_own(error: BaseException) -> bool:
    """Return whether an error is this process's, and not caused by others that went away during an operation."""
    from torch.distributed import DistError

    from ckpt_prune.parallel.torch_group import EndedError

    frames = traceback.extract_tb(error.__traceback__)
    inside = any(Path(frame.filename).parent == Path(__file__).parent and frame.name == "_wait" for frame in frames)
    return not (isinstance(error, EndedError | DistError) or (inside and isinstance(error, RuntimeError)))


def _message(error: BaseException) -> str:
    """Return a line for errors that are meant for users, else the traceback."""
    format_message = getattr(error, "format_message", None)  # click's
    if format_message is not None:
        return str(format_message())
    if isinstance(error, UserError):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()


def _ignore_signals() -> None:
    # torchrun stops all processes when one has ended, and this one has yet to tell why.
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
