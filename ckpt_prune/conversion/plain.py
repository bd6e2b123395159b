"""A stock checkpoint to be written: its config, and how each of its tensors is made from those of the source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TensorSource:
    """How a tensor of the new checkpoint is made.

    Attributes:
        sources: names of the tensors that `make` takes, in that order.
        shape: of the new tensor.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class PlainCheckpoint:
    """A stock checkpoint to be written.

    Attributes:
        tensors: on-disk name → how it is made, in the order of the file.
        processor: its preprocessor_config.json; None if the source's own is copied.
        notes: lines for the user.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorSource]
    processor: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def copy_tensor(name: str, shape: tuple[int, ...]) -> TensorSource:
    """Take a tensor of the source as it is."""
    return TensorSource((name,), shape, lambda tensor: tensor)
