"""What a checkpoint is written as: a stock config, and every tensor of it made of tensors of the source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Made:
    """A tensor of the new checkpoint.

    Attributes:
        sources: names of what it is made of.
        shape: its own.
        make: makes it of those, in that order.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Plain:
    """A stock checkpoint to be.

    Attributes:
        config: its config.json.
        tensors: on-disk name → how it is made, in the order of the file.
        processor: its preprocessor_config.json; None where the source's own is copied.
        notes: what else there is to say of it, a line each.
    """

    config: dict[str, Any]
    tensors: dict[str, Made]
    processor: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def same(name: str, shape: tuple[int, ...]) -> Made:
    """A tensor of the source as it is."""
    return Made((name,), shape, lambda tensor: tensor)
