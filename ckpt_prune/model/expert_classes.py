"""The activation between the linear modules of an expert, of transformers' classes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

Inner = Callable[[Tensor], Tensor]
"""Makes what an expert's last linear module reads of what those before it make, all rows in one axis."""


def find_inner(stock: Any) -> Inner | None:
    """Return what makes the inputs of the last linear module of a stock class's experts; None if it is not known."""
    if hasattr(stock, "_apply_gate") and getattr(stock, "has_gate", True):
        return stock._apply_gate  # type: ignore[no-any-return]
    if not hasattr(stock, "act_fn"):
        return None
    return stock.act_fn if not getattr(stock, "has_gate", True) else partial(_apply_gate, stock.act_fn)


def _apply_gate(activation: Inner, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return activation(gate) * up
