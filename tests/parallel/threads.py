"""Groups whose processes are threads of this one."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from ckpt_prune.parallel.group import working_in
from ckpt_prune.parallel.several import Several

T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size, timeout=60), [None] * size
        # One runs at a time: libraries change what all threads share while they build a model, and change it back.
        self.turn = threading.Lock()


class Threads(Several):
    """One of several threads."""

    def __init__(self, rank: int, meeting: Any) -> None:
        super().__init__(rank, meeting.barrier.parties, rank)
        self.meeting = meeting

    def gathered(self, tensor: Tensor) -> list[Tensor] | None:
        given = self.meet(tensor)
        assert len({(each.shape, each.dtype) for each in given}) == 1
        return given if self.first else None

    def spread(self, tensor: Tensor) -> Tensor:
        first = self.meet(tensor)[0]
        assert (first.shape, first.dtype) == (tensor.shape, tensor.dtype)
        return first.clone()

    def meet(self, tensor: Tensor) -> list[Tensor]:
        self.meeting.given[self.rank] = tensor.clone()
        self._wait()
        found = list(self.meeting.given)
        self._wait()
        return found

    def _wait(self) -> None:
        self.meeting.turn.release()
        try:
            self.meeting.barrier.wait()
        finally:
            self.meeting.turn.acquire()


def in_threads(size: int, work: Callable[[Several], T]) -> list[T]:
    """What each process of a group makes; the error of the first that has one of its own."""
    meeting, made, failed = _Meeting(size), {}, {}

    def run(rank: int) -> None:
        try:
            with meeting.turn, working_in(Threads(rank, meeting)) as group:
                made[rank] = work(group)
        except BaseException as error:
            failed[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for error in failed.values():
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [made[rank] for rank in range(size)]
