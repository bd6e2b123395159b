"""Progress bars: one place decides how long work is shown."""

import shutil
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(items: Iterable[T], what: str, *, total: int | None = None, unit: str = "block") -> Iterator[T]:
    """Iterate with a tqdm bar on stderr that says what is being done; silent when stderr is not a terminal."""
    # Not tqdm's own measure of the width: a terminal that reports none (0 columns) would get an empty line.
    columns = shutil.get_terminal_size().columns
    yield from tqdm(items, desc=what, total=total, unit=unit, disable=None, ncols=columns)
