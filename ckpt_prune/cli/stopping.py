"""SIGTERM and SIGHUP end a command as Ctrl-C does: what is done is kept, and the exit code tells which it was."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ckpt_prune.common.errors import find_interruption

_STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
_LATER = 0.05
"""Seconds after which a signal that was lost is sent again."""


class Stopped(KeyboardInterrupt):
    """A signal that asks to stop.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code(error: KeyboardInterrupt) -> int:
    """Return the exit code that shells use: 128 and the number of the signal."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` at the first SIGTERM or SIGHUP; more of them do not disturb what it makes the command do.

    A signal that was ignored stays so: `nohup` has SIGHUP ignored. One that comes while Python runs a callback that
    nobody called (of a weak reference, say), where an exception is lost, is sent again, and so is Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody handle signals
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    # None is a handler that is not Python's.
    before = {each: signal.getsignal(each) for each in _STOPS}
    before = {each: handler for each, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for each in before:
        signal.signal(each, stop)

    def lost(what: "sys.UnraisableHookArgs") -> None:
        if not isinstance(what.exc_value, KeyboardInterrupt):
            hook(what)
            return
        number = exit_code(what.exc_value) - 128
        if number in before:
            signal.signal(number, stop)
        # Not here: an exception in this hook would be lost as well.
        again = threading.Timer(_LATER, _send, (number,))
        again.daemon = True
        again.start()

    hook, sys.unraisablehook = sys.unraisablehook, lost
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def raise_interruptions() -> Iterator[None]:
    """Raise the interruption in place of an error that a library made of it."""
    try:
        yield
    except Exception as error:
        stop = find_interruption(error)
        if stop is None:
            raise
        raise stop from None


def _send(number: int) -> None:
    """Send a signal to the main thread, which it wakes where threads can be sent one."""
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, number)
    else:
        signal.raise_signal(number)
