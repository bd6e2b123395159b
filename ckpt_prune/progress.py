"""Progress bars: one place decides how long work is shown."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(items: Iterable[T], what: str, *, total: int | None = None, unit: str = "block") -> Iterator[T]:
    """Iterate with a tqdm bar on stderr that says what is being done; silent when stderr is not a terminal."""
    size = _size()
    yield from tqdm(items, desc=what, total=total, unit=unit, disable=None, ncols=size.columns, nrows=size.lines)


class Meter:
    """A bar over steps that several loops share.

    Args:
        bar: what is shown.
    """

    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar

    def step(self, step: int, value: float) -> None:
        """So many steps of a loop are done and have reached `value`; none before the first."""
        self._bar.set_postfix_str(f"{value:.6g}", refresh=False)
        self._bar.update(min(step, 1))

    def say(self, text: str) -> None:
        """What is being done, beside the bar."""
        self._bar.set_postfix_str(text)

    def to(self, done: int) -> None:
        """So many steps are done, whether taken or not."""
        self._bar.update(done - self._bar.n)


@contextmanager
def meter(total: int, what: str, *, unit: str = "step") -> Iterator[Meter]:
    """A tqdm bar as `track` shows it, moved by hand."""
    size = _size()
    with tqdm(total=total, desc=what, unit=unit, disable=None, ncols=size.columns, nrows=size.lines) as bar:
        yield Meter(bar)


def _size() -> os.terminal_size:
    """Not as tqdm measures it: a terminal that reports no size (0 columns, 0 lines) would get empty lines."""
    return shutil.get_terminal_size()
