"""What a process asks of those that it works with. One process alone is the default, and costs nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from ckpt_prune.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Group:
    """Processes that run the same command on the same input; here, a single one.

    All of them come to the same calls in the same order. The first one decides, writes and prints.

    Attributes:
        rank: which of them this process is, from 0.
        size: how many there are.
        local: which of those on its machine this process is.
    """

    rank = 0
    size = 1
    local = 0

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's run of a row of samples. Runs are contiguous, nearly equal, and in the order of processes."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def check_enough(self, samples: int) -> None:
        """Refuse fewer samples than there are processes to share them out to.

        Raises:
            UserError: some process would have none.
        """
        if samples < self.size:
            raise UserError(
                f"{self.size} processes cannot share {samples} sample{'s' * (samples != 1)}: every one needs at least "
                "one; start fewer, or take more samples"
            )

    def once(self, make: Callable[[], T]) -> T:
        """What the first process makes, in all of them."""
        return make()

    def alone(self, make: Callable[[], T]) -> T:
        """What the first process makes by itself, sharing none of the work, in all of them."""

        def by_itself() -> T:
            with working_in(ALONE):
                return make()

        return self.once(by_itself)

    def at_first(self, make: Callable[[], T]) -> T | None:
        """What the first process makes, and nothing in the others, which go on at once."""
        return make()

    def dealt(self, own: Sequence[T]) -> list[T]:
        """What every process has made of items that were dealt out (`items[rank::size]`), in order, in all of them."""
        return list(own)

    def gather(self, value: T) -> list[T] | None:
        """Every process's value in the order of processes, at the first one; nothing in the others."""
        return [value]

    def add(self, tensor: "Tensor") -> "Tensor":
        """The sum of every process's tensor at the first one, in float64 and in the order of processes.

        Other processes get what they gave.

        Args:
            tensor: of the same shape and dtype in all; the sum may take its place.
        """
        return tensor

    def shared(self, tensor: "Tensor") -> "Tensor":
        """The sum of every process's tensor, as of `add`, in all of them."""
        return tensor

    def total(self, value: float) -> float:
        """The sum of every process's number in the order of processes, in all of them."""
        parts = self.gather(value) or []
        return self.once(lambda: sum(parts))

    def join(self, tensor: "Tensor", dim: int) -> "Tensor":
        """Every process's tensor one behind the other, at the first one; the others get what they gave."""
        return tensor

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse to go on where processes differ.

        Args:
            facts: what has to be the same → its value in this process.

        Raises:
            UserError: naming the first fact and process that differ from the first one's.
        """


ALONE = Group()
_here: ContextVar[Group] = ContextVar("group", default=ALONE)


def process_group() -> Group:
    """The processes that this one works with."""
    return _here.get()


@contextmanager
def working_in(group: Group) -> Iterator[Group]:
    """Let what runs inside share its work with other processes."""
    token = _here.set(group)
    try:
        yield group
    finally:
        _here.reset(token)
