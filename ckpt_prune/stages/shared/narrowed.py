"""Facts of a model whose residual stream was narrowed."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ckpt_prune.model.model import Model


@dataclass(frozen=True)
class Narrowed:
    """A model whose residual stream was narrowed.

    Attributes:
        wide: the model before that.
        project: maps hidden states of `wide`, (..., d), to what the narrower stream has room for, (..., k).
        note: why the narrower model is of another class, or None.
    """

    wide: Model
    project: Callable[[Tensor], Tensor]
    note: str | None
