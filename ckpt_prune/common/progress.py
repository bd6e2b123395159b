"""Progress and notices on stderr, in one place: bars on a terminal, elsewhere at most one line a minute, or nothing."""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from tqdm import tqdm

from ckpt_prune.common.safe_text import escape_controls

T = TypeVar("T")
Clock = Callable[[], float]
"""Seconds from any moment on, never backwards."""
_EVERY_SECONDS = 60.0
_silent: ContextVar[bool] = ContextVar("silent", default=False)


def now() -> float:
    """Seconds, by the clock that decides what is said of long work."""
    return time.monotonic()


@contextmanager
def show_progress(shown: bool) -> Iterator[None]:
    """Let bars, lines and notices through, or print nothing at all."""
    token = _silent.set(not shown)
    try:
        yield
    finally:
        _silent.reset(token)


class Notices:
    """What a user should know while work goes on: each line is kept, and printed on stderr as it comes.

    Attributes:
        lines: all so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        """Say a line."""
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
    """Iterate and show on stderr what is being done, and how far it is.

    Args:
        items: to work on.
        what: is being done with them.
        total: how many there are; the length of `items` by default.
        unit: what one of them is.
        clock: for lines where stderr is no terminal; `now` by default.
    """
    if _silent.get():
        yield from items
        return
    if _is_terminal():
        size = _size()
        yield from tqdm(items, desc=what, total=total, unit=unit, ncols=size.columns, nrows=size.lines)
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    lines = _Lines(what, total, unit, clock or now)
    for item in items:
        yield item
        lines.update()


class _Lines:
    """What a bar says, in a line whenever a minute has passed since the last one or since the beginning.

    Args:
        what: is being done.
        total: steps in all, if that is known.
        unit: what a step is.
        clock: tells the time.

    Attributes:
        n: steps that are done.
    """

    def __init__(self, what: str, total: int | None, unit: str, clock: Clock) -> None:
        self._what, self._total, self._unit, self._clock = what, total, unit, clock
        self._begun = self._said = clock()
        self._postfix = ""
        self.n = 0

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """What else to say with the next line."""
        self._postfix = text

    def update(self, steps: int = 1) -> None:
        """So many more steps are done."""
        self.n += steps
        now = self._clock()
        if now - self._said >= _EVERY_SECONDS:
            self._said = now
            _print(self._line(now - self._begun))

    def _line(self, seconds: float) -> str:
        parts = [f"{self._unit} {self.n}"]
        if self._total:
            parts = [f"{self.n / self._total:.0%}", f"{self._unit} {self.n} of {self._total}"]
        parts.append(f"{_minutes(seconds)} so far")
        if self._total and 0 < self.n < self._total:
            parts.append(f"about {_minutes(seconds * (self._total - self.n) / self.n)} left")
        return f"{self._what}: {', '.join([*parts, *filter(None, [self._postfix])])}"


def _print(line: str) -> None:
    with suppress(OSError, ValueError):  # where stderr is closed, work goes on
        print(escape_controls(line), file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    """Hours and minutes, rounded up."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


class Meter:
    """What is shown of steps that several loops share.

    Args:
        bar: a bar, or lines; None shows nothing.
    """

    def __init__(self, bar: "tqdm[Any] | _Lines | None") -> None:
        self._bar = bar

    def step(self, step: int, value: float) -> None:
        """So many steps of a loop are done and have reached `value`; none before the first."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{value:.6g}", refresh=False)
            self._bar.update(min(step, 1))

    def say(self, text: str) -> None:
        """What is being done, beside the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def to(self, done: int) -> None:
        """So many steps are done, whether taken or not."""
        if self._bar is not None:
            self._bar.update(done - int(self._bar.n))


@contextmanager
def meter(total: int, what: str, *, unit: str = "step", clock: Clock | None = None) -> Iterator[Meter]:
    """What `track` shows, moved by hand."""
    if _silent.get():
        yield Meter(None)
        return
    if not _is_terminal():
        yield Meter(_Lines(what, total, unit, clock or now))
        return
    size = _size()
    with tqdm(total=total, desc=what, unit=unit, ncols=size.columns, nrows=size.lines) as bar:
        yield Meter(bar)


def are_bars_shown() -> bool:
    """Whether bars of others, which know nothing of `track`, may be shown as well."""
    return not _silent.get() and _is_terminal()


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False


def _size() -> os.terminal_size:
    """Not as tqdm measures it: a terminal that reports no size (0 columns, 0 lines) would get empty lines."""
    return shutil.get_terminal_size()
