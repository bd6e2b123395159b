"""A group of more than one process, built on two things: to gather equal tensors, and to spread one."""

import pickle
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.parallel.group import Group

T = TypeVar("T")
CHUNK = 2**22
"""Elements that are gathered at once: the first process holds so many of every process's, and of their sum."""


class SeveralProcesses(Group):
    """Processes that work together.

    What they send each other as bytes is pickled: they are processes of one command of one user.

    Args:
        rank: which of them this is.
        size: how many there are.
        local: which of those on its machine this is.
    """

    def __init__(self, rank: int, size: int, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local

    @abstractmethod
    def gathered(self, tensor: Tensor) -> list[Tensor] | None:
        """Every process's tensor, of equal shapes and dtypes, at the first one; the others get None."""

    @abstractmethod
    def spread(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, which may be written into the others' of equal shape and dtype."""

    def name(self, rank: int) -> str:
        """What a process is called in messages."""
        return f"rank {rank}"

    def once(self, make: Callable[[], T]) -> T:
        """What the first process makes, in all of them."""
        if self.first:
            made = make()
            self._spread_bytes(pickle.dumps(made, pickle.HIGHEST_PROTOCOL))
            return made
        return cast(T, pickle.loads(self._spread_bytes(b"")))

    def at_first(self, make: Callable[[], T]) -> T | None:
        """What the first process makes, and nothing in the others, which go on at once."""
        return make() if self.first else None

    def dealt(self, own: Sequence[T]) -> list[T]:
        """What every process has made of items that were dealt out, in order, in all of them."""
        parts = self.gather(list(own))

        def in_their_order() -> list[T]:
            assert parts is not None
            return [part[index] for index in range(len(parts[0])) for part in parts if index < len(part)]

        return self.once(in_their_order)

    def gather(self, value: T) -> list[T] | None:
        """Every process's value in the order of processes, at the first one; nothing in the others."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        sizes = self.gathered(torch.tensor([len(data)]))
        longest = torch.tensor([0]) if sizes is None else torch.stack(sizes).amax(0)
        padded = torch.zeros(int(self.spread(longest)), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self.gathered(padded)
        if parts is None or sizes is None:
            return None
        found: list[Any] = [
            pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
        ]
        return found

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor at the first one, in float64 and in the order of processes."""
        flat = tensor.contiguous().view(-1)
        for chunk in torch.split(flat, CHUNK) if len(flat) else ():
            parts = self.gathered(chunk)
            if parts is not None:
                chunk.copy_(add_in_order(parts))
        return flat.view(tensor.shape)

    def shared(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor, as of `add`, in all of them."""
        return self.spread(self.add(tensor))

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """Every process's tensor one behind the other, at the first one; the others get what they gave."""
        parts = self.gather(tensor)
        return tensor if parts is None else torch.cat(parts, dim)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse to go on where processes differ; the first one finds out, and its error ends the others."""
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
