"""The group of processes that share a job. A single process is the default, and costs nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from ckpt_prune.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Group:
    """Processes that run the same command on the same input; in this class, a single one.

    All of them make the same calls in the same order. The first one decides, writes and prints.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        local: number of this process among those on its machine.
    """

    rank = 0
    size = 1
    local = 0

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return this process's run of `count` samples. Runs are contiguous, nearly equal, and in order of ranks."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def check_enough(self, samples: int) -> None:
        """Refuse fewer samples than processes."""
        if samples < self.size:
            raise UserError(
                f"{self.size} processes cannot share {samples} sample{'s' * (samples != 1)}: every one needs at least "
                "one; start fewer, or take more samples"
            )

    def once(self, make: Callable[[], T]) -> T:
        """Let the first process make a value, and return it in all of them."""
        return make()

    def alone(self, make: Callable[[], T]) -> T:
        """Let the first process make a value without sharing the work, and return it in all of them."""

        def make_alone() -> T:
            with working_in(ALONE):
                return make()

        return self.once(make_alone)

    def on_first(self, make: Callable[[], T]) -> T | None:
        """Let the first process make a value; the others get None and continue at once."""
        return make()

    def interleave(self, own: Sequence[T]) -> list[T]:
        """Return in all processes the results of items that were dealt out (`items[rank::size]`), in their order."""
        return list(own)

    def gather(self, value: T) -> list[T] | None:
        """Return every process's value in order of ranks at the first one, and None in the others."""
        return [value]

    def add(self, tensor: "Tensor") -> "Tensor":
        """Return the sum of every process's tensor at the first one, in float64 and in order of ranks.

        Other processes get what they gave.

        Args:
            tensor: of the same shape and dtype in all; the sum may replace it.
        """
        return tensor

    def add_for_all(self, tensor: "Tensor") -> "Tensor":
        """Return the same sum as `add` in all processes."""
        return tensor

    def total(self, value: float) -> float:
        """Return the sum of every process's number, in order of ranks, in all of them."""
        values = self.gather(value) or []
        return self.once(lambda: sum(values))

    def join(self, tensor: "Tensor", dim: int) -> "Tensor":
        """Concatenate every process's tensor at the first one; the others get what they gave."""
        return tensor

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse to continue if any of these facts (name → value) differs between processes."""


ALONE = Group()
_group: ContextVar[Group] = ContextVar("group", default=ALONE)


def process_group() -> Group:
    """Return the group that this process works in."""
    return _group.get()


@contextmanager
def working_in(group: Group) -> Iterator[Group]:
    """Share the work of the body with the processes of a group."""
    token = _group.set(group)
    try:
        yield group
    finally:
        _group.reset(token)
