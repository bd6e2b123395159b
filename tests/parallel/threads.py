"""Groups whose processes are threads of this one."""

import threading
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ckpt_prune.parallel.group import Group, working_in

T = TypeVar("T")


class LeftAloneError(RuntimeError):
    """A thread waits for one that has ended."""


class _Meeting:
    """Lets one thread run at a time, in the order of ranks: every run of a test takes the same way.

    One at a time also because libraries change what all threads share while they build a model, and change it back.
    """

    def __init__(self, size: int) -> None:
        self.given: list[Tensor | None] = [None] * size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._waits = [0] * size
        self._running = set(range(size))

    @property
    def size(self) -> int:
        return len(self._turns)

    def start(self) -> None:
        """Let the first one run."""
        self._turns[0].release()

    def begin(self, rank: int) -> None:
        """Wait for this thread's first turn."""
        self._turns[rank].acquire()

    def wait(self, rank: int) -> None:
        """Wait until all others are here too: then the turn comes round."""
        self._waits[rank] += 1
        self._pass_on(rank)
        self._turns[rank].acquire()
        if min(self._waits) < self._waits[rank]:
            raise LeftAloneError

    def end(self, rank: int) -> None:
        """Let the others run; this thread takes no turn any more."""
        self._running.discard(rank)
        if self._running:
            self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        ranks = [*range(rank + 1, self.size), *range(rank + 1)]
        self._turns[next(candidate for candidate in ranks if candidate in self._running)].release()


class Threads(Group):
    """One of several threads."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.size, rank)
        self.meeting = meeting

    def gather_tensors(self, tensor: Tensor) -> list[Tensor] | None:
        given = self.meet(tensor)
        assert len({(part.shape, part.dtype) for part in given}) == 1
        return given if self.first else None

    def spread(self, tensor: Tensor) -> Tensor:
        first = self.meet(tensor)[0]
        assert (first.shape, first.dtype) == (tensor.shape, tensor.dtype)
        return first.clone()

    def meet(self, tensor: Tensor) -> list[Tensor]:
        self.meeting.given[self.rank] = tensor.clone()
        self.meeting.wait(self.rank)
        tensors = [part for part in self.meeting.given if part is not None]
        self.meeting.wait(self.rank)
        return tensors


def in_threads(size: int, work: Callable[[Group], T]) -> list[T]:
    """Return the result of each process of a group; raise the error of the first that has one of its own."""
    meeting = _Meeting(size)
    results: dict[int, T] = {}
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        meeting.begin(rank)
        try:
            with working_in(Threads(rank, meeting)) as group:
                results[rank] = work(group)
        except BaseException as error:
            failed.append(error)
        finally:
            meeting.end(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    meeting.start()
    for thread in threads:
        thread.join()
    for error in failed:
        if not isinstance(error, LeftAloneError):
            raise error
    return [results[rank] for rank in range(size)]
