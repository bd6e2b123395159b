"""The group of processes that share a job. A single process is the default, and costs nothing."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar, cast

from ckpt_prune.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
CHUNK = 2**22
"""Elements that are gathered at once. The first process holds this many of every process, and of their sum."""


class Group:
    """Processes that run the same command on the same input; in this class, a single one.

    All of them make the same calls in the same order. The first one decides, writes and prints. A group of several is
    a subclass with two operations, `gather_tensors` and `spread`; all others follow from them. Objects are sent
    pickled, since all are processes of one command of one user.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        local: number of this process among those on its machine.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local

    def gather_tensors(self, tensor: "Tensor") -> "list[Tensor] | None":
        """Return every process's tensor, of equal shapes and dtypes, at the first one; None in the others."""
        return [tensor]

    def spread(self, tensor: "Tensor") -> "Tensor":
        """Return the first process's tensor. It may be written into the others' of equal shape and dtype."""
        return tensor

    def name(self, rank: int) -> str:
        return f"rank {rank}"

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
        if self.size == 1:
            return make()
        if self.first:
            value = make()
            self._spread_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
            return value
        return cast(T, pickle.loads(self._spread_bytes(b"")))

    def alone(self, make: Callable[[], T]) -> T:
        """Let the first process make a value without sharing the work, and return it in all of them."""

        def make_alone() -> T:
            with working_in(ALONE):
                return make()

        return self.once(make_alone)

    def on_first(self, make: Callable[[], T]) -> T | None:
        """Let the first process make a value; the others get None and continue at once."""
        return make() if self.first else None

    def interleave(self, results: Sequence[T]) -> list[T]:
        """Return in all processes the results of items that were dealt out (`items[rank::size]`), in their order."""
        parts = self.gather(list(results)) or [[]]
        return self.once(lambda: [part[index] for index in range(len(parts[0])) for part in parts if index < len(part)])

    def gather(self, value: T) -> list[T] | None:
        """Return every process's value in order of ranks at the first one, and None in the others."""
        if self.size == 1:
            return [value]
        import torch

        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        sizes = self.gather_tensors(torch.tensor([len(data)]))
        longest = torch.tensor([0]) if sizes is None else torch.stack(sizes).amax(0)
        padded = torch.zeros(int(self.spread(longest)), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self.gather_tensors(padded)
        if parts is None or sizes is None:
            return None
        return [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def add(self, tensor: "Tensor") -> "Tensor":
        """Return the sum of every process's tensor at the first one, in float64 and in order of ranks.

        Other processes get what they gave.

        Args:
            tensor: of the same shape and dtype in all; the sum may replace it.
        """
        if self.size == 1:
            return tensor
        import torch

        flat = tensor.contiguous().view(-1)
        for chunk in torch.split(flat, CHUNK) if len(flat) else ():
            parts = self.gather_tensors(chunk)
            if parts is not None:
                chunk.copy_(add_in_order(parts))
        return flat.view(tensor.shape)

    def total(self, value: float) -> float:
        """Return the sum of every process's number, in order of ranks, in all of them."""
        values = self.gather(value) or []
        return self.once(lambda: sum(values))

    def join(self, tensor: "Tensor", dim: int) -> "Tensor":
        """Concatenate every process's tensor at the first one; the others get what they gave."""
        import torch

        parts = self.gather(tensor)
        return tensor if parts is None or self.size == 1 else torch.cat(parts, dim)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse to continue if any of these facts (name → value) differs between processes.

        The first process finds out, and its error ends the others.
        """
        for rank, theirs in enumerate(self.gather(dict(facts)) or ()):
            for what, value in facts.items():
                if theirs.get(what) != value:
                    raise UserError(
                        f"{self.name(rank)} has another {what} than {self.name(0)}: all processes of a run need the "
                        "same"
                    )

    def _spread_bytes(self, data: bytes) -> bytes:
        import torch

        size = int(self.spread(torch.tensor([len(data)])))
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(size, dtype=torch.uint8)
        return self.spread(buffer).numpy().tobytes() if size else b""


def add_in_order(parts: "Iterable[Tensor]") -> "Tensor":
    """Return Σ of tensors of one shape and dtype, added from first to last in float64 and rounded once.

    The same parts in the same order give the same bytes. Other ways to cut the same terms into parts change the sum by
    rounding in float64 only, which sums in float32 hardly show.
    """
    import torch

    first, *others = parts
    wide = torch.promote_types(first.dtype, torch.float64) if first.is_floating_point() else first.dtype
    total = first.to(wide, copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


ALONE = Group()
_group: ContextVar[Group] = ContextVar("group", default=ALONE)


def process_group() -> Group:
    return _group.get()


@contextmanager
def working_in(group: Group) -> Iterator[Group]:
    """Share the work of the body with the processes of a group."""
    token = _group.set(group)
    try:
        yield group
    finally:
        _group.reset(token)
