"""A tensor of a GGUF file that is read and changed when it is asked for."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class GgufWeight:
    """A tensor of a file: its shape is known, and its values are read, and changed, each time they are asked for.

    Attributes:
        shape: as in torch, rows first.
        read: returns the values; those of a checkpoint's own tensor have its dtype, others are float32.
        zeros: elements that it was filled up with.
        parts: tensors that it is a stack of, as those of experts are.
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    zeros: int = 0
    parts: tuple["GgufWeight", ...] = ()

    @classmethod
    def stack(cls, parts: Sequence["GgufWeight"]) -> "GgufWeight":
        """Return tensors of one shape as one, (tensors, …)."""
        shape, zeros = (len(parts), *parts[0].shape), sum(part.zeros for part in parts)
        return cls(shape, lambda: torch.stack([part.read() for part in parts]), zeros, tuple(parts))

    @classmethod
    def join(cls, parts: Sequence["GgufWeight"], axis: int) -> "GgufWeight":
        """Return tensors as one, one behind the other on an axis, each in float32."""
        if all(part.parts for part in parts) and axis:
            return cls.stack([cls.join(each, axis - 1) for each in zip(*(part.parts for part in parts), strict=True)])
        shape = [*parts[0].shape]
        shape[axis] = sum(part.shape[axis] for part in parts)
        zeros = sum(part.zeros for part in parts)
        return cls(tuple(shape), lambda: torch.cat([part.read().float() for part in parts], axis), zeros)

    def transpose(self) -> "GgufWeight":
        """Return it with its last two axes the other way round."""
        if self.parts:
            return self.stack([part.transpose() for part in self.parts])
        return self.apply(lambda tensor: tensor.mT, (*self.shape[:-2], self.shape[-1], self.shape[-2]))

    def apply(self, change: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None = None) -> "GgufWeight":
        """Return the same tensor in float32, changed."""
        return GgufWeight(self.shape if shape is None else shape, lambda: change(self.read().float()), self.zeros)

    def fill(self, axis: int, now: tuple[int, ...], filled: tuple[int, ...]) -> "GgufWeight":
        """Return it with zeros behind what an axis holds.

        Args:
            axis: of the tensor.
            now: how the axis divides, such as (groups, heads of a group, rows of a head).
            filled: how the axis divides once zeros fill it up.
        """
        if now == filled:
            return self
        if self.parts:
            return self.stack([part.fill(axis - 1, now, filled) for part in self.parts])
        shape = (*self.shape[:axis], math.prod(filled), *self.shape[axis + 1 :])

        def change(tensor: Tensor) -> Tensor:
            new = tensor.new_zeros(*shape[:axis], *filled, *shape[axis + 1 :])
            part = (slice(None),) * axis + tuple(slice(size) for size in now)
            new[part] = tensor.reshape(*shape[:axis], *now, *shape[axis + 1 :])
            return new.reshape(shape)

        return replace(self.apply(change, shape), zeros=self.zeros + math.prod(shape) - math.prod(self.shape))

    def take(self, axis: int, places: Tensor) -> "GgufWeight":
        """Return what stands at these places of an axis, in their order."""
        if self.parts:
            return self.stack([part.take(axis - 1, places) for part in self.parts])
        shape = (*self.shape[:axis], len(places), *self.shape[axis + 1 :])
        return self.apply(lambda tensor: tensor.index_select(axis, places), shape)

    def pair_neighbours(self, heads: int, rotated: int, *, back: bool = False) -> "GgufWeight":
        """Reorder the first `rotated` rows of each head so that rotary pairs, their halves, are neighbours, or back."""
        rows = torch.arange(self.shape[0]).reshape(heads, -1)
        pairs = rows[:, :rotated].reshape((heads, -1, 2) if back else (heads, 2, -1)).mT.flatten(1)
        return self.take(0, torch.cat([pairs, rows[:, rotated:]], 1).flatten())

    def times(self, factor: float) -> "GgufWeight":
        """Return it multiplied by a number."""
        return self if factor == 1 else self.apply(lambda tensor: tensor * factor)

    def plus(self, number: float) -> "GgufWeight":
        """Return it with a number added."""
        return self if number == 0 else self.apply(lambda tensor: tensor + number)
