"""Progress bars: one place decides how long work is shown."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(items: Iterable[T], what: str, *, total: int | None = None, unit: str = "block") -> Iterator[T]:
    """Iterate with a tqdm bar on stderr that says what is being done; silent when stderr is not a terminal."""
    yield from tqdm(items, desc=what, total=total, unit=unit, disable=None, dynamic_ncols=True)
