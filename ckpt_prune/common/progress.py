"""Progress and notices on stderr: bars on a terminal, elsewhere at most one line a minute, or nothing at all."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from tqdm import tqdm

from ckpt_prune.common.formatting import format_duration
from ckpt_prune.common.safe_text import escape_controls

T = TypeVar("T")
Clock = Callable[[], float]
"""Returns seconds since any moment, and never goes backwards."""
_LINE_SECONDS = 60.0
_silent: ContextVar[bool] = ContextVar("silent", default=False)
_began: ContextVar[float | None] = ContextVar("began", default=None)
"""When the call that is running began."""
_printed: ContextVar[list[float] | None] = ContextVar("printed", default=None)
"""When the call that is running printed its last line of progress, or began."""
_said: ContextVar[set[str] | None] = ContextVar("said", default=None)
"""Lines of `say_once` in the call that is running."""


def now() -> float:
    """Return seconds by the clock that decides when long work reports."""
    return time.monotonic()


@contextmanager
def show_progress(shown: bool) -> Iterator[None]:
    """Print bars, lines and notices within this context, or nothing at all."""
    lines, began = _said.get(), _began.get()
    token, inside = _silent.set(not shown), _said.set(set() if lines is None else lines)
    start = _began.set(time.monotonic() if began is None else began)
    printed = _printed.set(_printed.get() or [now()])
    try:
        yield
    finally:
        _silent.reset(token)
        _said.reset(inside)
        _began.reset(start)
        _printed.reset(printed)


def elapsed_seconds() -> float:
    """Return the seconds since the outermost `show_progress`: what a command has spent so far, imports included."""
    began = _began.get()
    return 0.0 if began is None else time.monotonic() - began


def say_once(line: str, of: str = "") -> None:
    """Print a notice, unless it, or one `of` the same, was printed before within the context of `show_progress`."""
    printed, key = _said.get(), of or line
    if printed is None or key not in printed:
        Notices()(line)
    if printed is not None:
        printed.add(key)


class Notices:
    """Lines that the user should read while work goes on. Each is kept, and printed on stderr at once.

    Attributes:
        lines: all so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        """Keep and print a line."""
        self.lines.append(line)
        if not _silent.get():
            _print(line)


def track(
    items: Iterable[T],
    what: str,
    *,
    total: int | None = None,
    unit: str = "block",
    clock: Clock | None = None,
) -> Iterator[T]:
    """Iterate over items and show on stderr what is done and how far it is.

    Args:
        items: to work on.
        what: is done with them.
        total: number of items; the length of `items` by default.
        unit: name of one item.
        clock: for lines where stderr is not a terminal; `now` by default.
    """
    if _silent.get():
        yield from items
        return
    if _is_terminal():
        size = _terminal_size()
        yield from tqdm(items, desc=what, total=total, unit=unit, ncols=size.columns, nrows=size.lines)
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    lines = _Lines(what, total, unit, clock)
    for item in items:
        yield item
        lines.update()


class _Lines:
    """Prints what a bar would show, as a line whenever a minute has passed. It has the methods of a tqdm bar.

    Minutes are those of the whole call: of several short loops some print a line.

    Args: as in `track`.

    Attributes:
        n: steps that are done.
    """

    def __init__(self, what: str, total: int | None, unit: str, clock: Clock | None) -> None:
        self._what, self._total, self._unit, self._clock = what, total, unit, clock or now
        self._start = self._clock()
        self._printed = (_printed.get() if clock is None else None) or [self._start]
        self._postfix = ""
        self.n = 0

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Add a text to the next line."""
        self._postfix = text

    def update(self, steps: int = 1) -> None:
        """Count more steps as done."""
        self.n += steps
        time_now = self._clock()
        if time_now - self._printed[0] >= _LINE_SECONDS:
            self._printed[0] = time_now
            _print(self._line(time_now - self._start))

    def _line(self, seconds: float) -> str:
        parts = [f"{self._unit} {self.n}"]
        if self._total:
            parts = [f"{self.n / self._total:.0%}", f"{self._unit} {self.n} of {self._total}"]
        parts.append(f"{format_duration(seconds)} so far")
        if self._total and 0 < self.n < self._total:
            parts.append(f"about {format_duration(seconds * (self._total - self.n) / self.n)} left")
        return f"{self._what}: {', '.join([*parts, *filter(None, [self._postfix])])}"


def _print(line: str) -> None:
    with suppress(OSError, ValueError):  # if stderr is closed, work goes on
        print(escape_controls(line), file=sys.stderr, flush=True)


class Meter:
    """Shows the steps that several loops share.

    Args:
        bar: a bar, or lines; None shows nothing.
    """

    def __init__(self, bar: "tqdm[Any] | _Lines | None") -> None:
        self._bar = bar

    def step(self, step: int, value: float) -> None:
        """Count a step of a loop, unless it is step 0, and show the value that it reached."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{value:.6g}", refresh=False)
            self._bar.update(min(step, 1))

    def say(self, text: str) -> None:
        """Show beside the bar what is being done."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def to(self, done: int) -> None:
        """Set how many steps are done or skipped."""
        if self._bar is not None:
            self._bar.update(done - int(self._bar.n))


@contextmanager
def meter(total: int, what: str, *, unit: str = "step", clock: Clock | None = None) -> Iterator[Meter]:
    """Show what `track` shows, moved by hand."""
    if _silent.get():
        yield Meter(None)
        return
    if not _is_terminal():
        yield Meter(_Lines(what, total, unit, clock))
        return
    size = _terminal_size()
    with tqdm(total=total, desc=what, unit=unit, ncols=size.columns, nrows=size.lines) as bar:
        yield Meter(bar)


def are_bars_shown() -> bool:
    """Return whether bars of other libraries may be shown as well."""
    return not _silent.get() and _is_terminal()


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False


def _terminal_size() -> os.terminal_size:
    # Not as tqdm measures it: a terminal that reports no size (0 columns, 0 lines) would get empty lines.
    return shutil.get_terminal_size()
