"""Where a command begins and ends that torchrun has started in several processes."""

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.common.errors import UserError
from ckpt_prune.parallel.group import ALONE, Group, working_in
from ckpt_prune.parallel.watch import describe_end

if TYPE_CHECKING:
    pass

_FAILED = 2
_TELLING = 5.0
"""Seconds that the first process has to tell the user what another one failed of, before that one does."""
_SIGNING = 2.0
"""Seconds within which a process that lives gives a sign of it."""


def is_started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def join_processes() -> Iterator[Group]:
    """Let what runs inside share its work with the other processes that torchrun has started, if it has.

    Of these only the first prints. When one fails, all end, and the first one tells which it was and why.

    Raises:
        UserError: another process has failed, or died.
        SystemExit: in other processes than the first, where any failed.
    """
    if not is_started_by_torchrun():
        yield ALONE
        return
    from ckpt_prune.parallel.torch_group import TorchGroup
    from ckpt_prune.parallel.torchrun import versions

    with _quiet(int(os.environ["RANK"]) > 0):
        group = TorchGroup()
        try:
            with working_in(group):
                group.agree(versions())
                yield group
        except BaseException as error:
            if getattr(error, "exit_code", None) == 0:  # click's way to end: nothing is wrong
                group.close()
                raise
            told = _accounted(group, error)
            if not group.first:
                raise SystemExit(_FAILED) from None
            if told is not None:
                raise UserError(told) from error
            raise
        group.close()


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


def _accounted(group: "Processes", error: BaseException) -> str | None:
    """Let the others know that this process ends, and find out what the user is to be told.

    Returns:
        At the first process what another one failed of, or that it died; None where this one's own error tells it.
    """
    _undisturbed()
    watch = group.watch
    watch.close()
    try:
        by_signal = isinstance(error, KeyboardInterrupt)
        own = not by_signal and _own(error)
        if watch.heard() is None and own:
            watch.fail(_message(error))
        elif by_signal or not own:
            watch.went()
        if not group.first:
            if own and watch.end is None and not watch.wait_told(_TELLING):
                os.write(2, f"Error: {group.name(group.rank)}: {_message(error)}\n".encode())
            return None
        end = watch.heard()
        told = None if end is None or own else describe_end(end, group.name)
        if told is None and not own and (dead := watch.missing(_SIGNING)):
            # It may have said why while it was waited for.
            end = watch.heard()
            told = f"{group.name(dead[0])} died without a word: it was killed, or ran out of memory"
            told = told if end is None else describe_end(end, group.name)
        watch.told()
        return told
    except Exception:  # torch's own kinds: torchrun, which keeps the store, is gone
        return None if watch.end is None else watch.end.message


def _own(error: BaseException) -> bool:
    """Whether an error is this process's, and not that others went away while it spoke to them."""
    from torch.distributed import DistError

    from ckpt_prune.parallel.torch_group import EndedError

    frames = traceback.extract_tb(error.__traceback__)
    inside = any(Path(frame.filename).parent == Path(__file__).parent and frame.name == "_wait" for frame in frames)
    return not (isinstance(error, EndedError | DistError) or (inside and isinstance(error, RuntimeError)))


def _message(error: BaseException) -> str:
    """What a user is told of an error: a line where it is meant for one, else all there is."""
    told = getattr(error, "format_message", None)  # click's
    if told is not None:
        return str(told())
    if isinstance(error, UserError):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()


def _undisturbed() -> None:
    """Let no further signal keep this process from telling: torchrun stops all when one has ended."""
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
