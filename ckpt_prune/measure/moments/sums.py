"""Sums over samples or tokens, field by field; they add."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from ckpt_prune.parallel.group import Group


def add_widest(group: Group, tensor: Tensor) -> Tensor:
    """Add tensors of one shape as `Group.add` does, in the widest floating type that any process has."""
    wide = group.total(float(tensor.dtype == torch.float64)) > 0
    return group.add(tensor.double() if wide else tensor)


@dataclass(frozen=True)
class Sums:
    """A base class for sums: every field is a tensor or a number, and adds."""

    def _map(self, change: Callable[[str, Any], Any]) -> Self:
        return replace(self, **{field.name: change(field.name, getattr(self, field.name)) for field in fields(self)})

    def __add__(self, other: Self) -> Self:
        return self._map(lambda name, value: value + getattr(other, name))

    def __sub__(self, other: Self) -> Self:
        return self._map(lambda name, value: value - getattr(other, name))

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda _, value: value.to(device) if isinstance(value, Tensor) else value)

    def pool(self, group: Group) -> Self:
        """Add the sums of all processes, in their order, at the first one."""
        return self._map(lambda _, sums: add_widest(group, sums) if isinstance(sums, Tensor) else group.total(sums))
