"""A group of several processes, built on two operations: gather equal tensors, and spread one."""

import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.parallel.group import Group

T = TypeVar("T")
CHUNK = 2**22
"""Elements that are gathered at once. The first process holds this many of every process, and of their sum."""


class SeveralProcesses(Group):
    """Processes that work together.

    Objects are sent pickled, since all are processes of one command of one user.

    Args: as the attributes of `Group`.
    """

    def __init__(self, rank: int, size: int, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local

    @abstractmethod
    def gather_tensors(self, tensor: Tensor) -> list[Tensor] | None:
        """Return every process's tensor, of equal shapes and dtypes, at the first one; None in the others."""

    @abstractmethod
    def spread(self, tensor: Tensor) -> Tensor:
        """Return the first process's tensor. It may be written into the others' of equal shape and dtype."""

    def name(self, rank: int) -> str:
        """Return the name of a process for messages."""
        return f"rank {rank}"

    def once(self, make: Callable[[], T]) -> T:
        """Let the first process make a value, and return it in all of them."""
        if self.first:
            made = make()
            self._spread_bytes(pickle.dumps(made, pickle.HIGHEST_PROTOCOL))
            return made
        return cast(T, pickle.loads(self._spread_bytes(b"")))

    def on_first(self, make: Callable[[], T]) -> T | None:
        """Let the first process make a value; the others get None and continue at once."""
        return make() if self.first else None

    def interleave(self, own: Sequence[T]) -> list[T]:
        """Return in all processes the results of items that were dealt out, in their order."""
        parts = self.gather(list(own)) or [[]]
        return self.once(lambda: [part[index] for index in range(len(parts[0])) for part in parts if index < len(part)])

    def gather(self, value: T) -> list[T] | None:
        """Return every process's value in order of ranks at the first one, and None in the others."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        sizes = self.gather_tensors(torch.tensor([len(data)]))
        longest = torch.tensor([0]) if sizes is None else torch.stack(sizes).amax(0)
        padded = torch.zeros(int(self.spread(longest)), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self.gather_tensors(padded)
        if parts is None or sizes is None:
            return None
        return [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum of every process's tensor at the first one, in float64 and in order of ranks."""
        flat = tensor.contiguous().view(-1)
        for chunk in torch.split(flat, CHUNK) if len(flat) else ():
            parts = self.gather_tensors(chunk)
            if parts is not None:
                chunk.copy_(add_in_order(parts))
        return flat.view(tensor.shape)

    def add_for_all(self, tensor: Tensor) -> Tensor:
        """Return the same sum as `add` in all processes."""
        return self.spread(self.add(tensor))

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate every process's tensor at the first one; the others get what they gave."""
        parts = self.gather(tensor)
        return tensor if parts is None else torch.cat(parts, dim)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse to continue if a fact differs. The first process finds out, and its error ends the others."""
        for rank, theirs in enumerate(self.gather(dict(facts)) or ()):
            for what, value in facts.items():
                if theirs.get(what) != value:
                    raise UserError(
                        f"{self.name(rank)} has another {what} than {self.name(0)}: all processes of a run need the "
                        "same"
                    )

    def _spread_bytes(self, data: bytes) -> bytes:
        size = int(self.spread(torch.tensor([len(data)])))
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(size, dtype=torch.uint8)
        return self.spread(own).numpy().tobytes() if size else b""


def add_in_order(parts: Iterable[Tensor]) -> Tensor:
    """Return Σ of tensors of one shape and dtype, added from first to last in float64 and rounded once.

    The same parts in the same order give the same bytes. Other ways to cut the same terms into parts change the sum by
    rounding in float64 only, which sums in float32 hardly show.

    Args:
        parts: at least one.
    """
    rest = iter(parts)
    first = next(rest)
    wide = torch.promote_types(first.dtype, torch.float64) if first.is_floating_point() else first.dtype
    total = first.to(wide, copy=True)
    for part in rest:
        total += part
    return total.to(first.dtype)
