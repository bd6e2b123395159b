"""Ratios as people write them: 0.2 or 20%."""

from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BeforeValidator

from ckpt_prune.common.errors import UserError


def parse_percentage(text: str) -> float | None:
    """The number that a percentage such as "20%" is: 0.2; None for what is no percentage."""
    try:
        return float(Decimal(text.strip().removesuffix("%")) / 100) if text.strip().endswith("%") else None
    except InvalidOperation:
        return None


def suggest_percentage(ratio: float) -> str:
    """What to ask where a ratio is too large and reads like a percentage; empty elsewhere."""
    return f": did you mean {ratio:g}% or {ratio / 100:g}?" if 2 <= ratio < 100 else ""


def check_ratio(value: Any) -> Any:
    """A ratio from a number or a percentage; what is neither is left to its type.

    Raises:
        UserError: it is not in [0, 1).
    """
    ratio = parse_ratio(value)
    # `not` catches NaN as well.
    if isinstance(ratio, int | float) and not 0 <= ratio < 1:
        raise UserError(f"--ratio {ratio:g}: a ratio is in [0, 1){suggest_percentage(ratio)}")
    return ratio


def parse_ratio(value: Any) -> Any:
    """The number that a percentage is; any other value as it is."""
    share = parse_percentage(value) if isinstance(value, str) else None
    return value if share is None else share


Ratio = Annotated[float, BeforeValidator(parse_ratio)]
"""A number, or a percentage such as 20%."""
