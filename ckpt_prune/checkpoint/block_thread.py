"""A thread that reads the next block, and writes the last one, while this one is computed.

At most one block waits to be taken and one to be written. Errors are raised where the block is taken, or where the next
one is given to be written.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class BlockThread(Generic[T]):
    """Reads blocks in an order that is known, and writes them. Leaving it waits for what was begun.

    Args:
        read: reads a block by its number.
        order: numbers that are read ahead, in the order in which they are taken.
    """

    def __init__(self, read: Callable[[int], T], order: Sequence[int]) -> None:
        self._read, self._order = read, order
        self._thread = ThreadPoolExecutor(1, "blocks")
        self._ahead: tuple[int, Future[T]] | None = None
        self._behind: Future[None] | None = None

    def __enter__(self) -> "BlockThread[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._thread.shutdown()  # what is being written gets finished
        if error is None:
            self.finish()

    def take(self, block: int) -> T:
        """Return a block, and begin to read the one that follows it in the order."""
        ahead, self._ahead = self._ahead, None
        taken = self._read(block) if ahead is None or ahead[0] != block else ahead[1].result()
        later = self._order[self._order.index(block) + 1 :] if block in self._order else ()
        if later:
            self._ahead = later[0], self._thread.submit(self._read, later[0])
        return taken

    def write(self, write: Callable[[], None]) -> None:
        """Let the thread call `write`, when the one before has succeeded."""
        self.finish()
        self._behind = self._thread.submit(write)

    def finish(self) -> None:
        """Wait until everything is written, and raise the error if it failed."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()


def read_ahead(read: Callable[[int], T], blocks: Sequence[int]) -> Iterator[tuple[int, T]]:
    """Yield blocks with their numbers; the next one is read while this one is used."""
    with BlockThread(read, blocks) as thread:
        for block in blocks:
            yield block, thread.take(block)
