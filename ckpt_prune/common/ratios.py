"""Ratios as people write them: 0.2 or 20%."""

from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BeforeValidator

from ckpt_prune.common.errors import UserError


def parse_percentage(text: str) -> float | None:
    """Return 0.2 for "20%", and None for text that is not a percentage."""
    try:
        return float(Decimal(text.strip().removesuffix("%")) / 100) if text.strip().endswith("%") else None
    except InvalidOperation:
        return None


def suggest_percentage(ratio: float) -> str:
    """Ask for the ratio that was probably meant, if a ratio looks like a percentage; else return nothing."""
    return f": did you mean {ratio:g}% or {ratio / 100:g}?" if 2 <= ratio < 100 else ""


def refuse_ratio(written: str, ratio: float) -> UserError:
    """Return the error for a ratio that is out of range, as it was written."""
    meant = suggest_percentage(ratio)
    return UserError(f"--ratio {written}: a ratio is from 0 to below 1, or a percentage such as 20%{meant}")


def check_ratio(value: Any) -> Any:
    """Read a number or a percentage as a ratio in [0, 1); leave anything else to the check of types."""
    ratio = parse_ratio(value)
    # `not` catches NaN as well.
    if isinstance(ratio, int | float) and not 0 <= ratio < 1:
        raise refuse_ratio(f"{ratio:g}", ratio)
    return ratio


def parse_ratio(value: Any) -> Any:
    """Turn a percentage into its number, and return any other value unchanged."""
    share = parse_percentage(value) if isinstance(value, str) else None
    return value if share is None else share


Ratio = Annotated[float, BeforeValidator(parse_ratio)]
"""A number, or a percentage such as 20%."""

FAR = 0.1
"""A share that is reached counts as another than the one asked for when it differs by more than this part of that."""


def is_far(asked: float, reached: float) -> bool:
    """Return True if the share that is reached is another than the one asked for: by more than `FAR` of that."""
    return abs(reached - asked) > FAR * asked
