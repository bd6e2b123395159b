"""What the models of a recipe share: strictness, and strings that must be keys of a registry."""

import difflib
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


class OneOf:
    """Annotates a string that must be a key of a registry: `Annotated[str, OneOf("score", SCORES)]`.

    The registry's keys stand in the errors and in the JSON Schema. The annotated type is what type checkers see: a
    `Literal` of the same keys will do.
    """

    def __init__(self, what: str, known: Iterable[str]):
        self.what = what
        self.names = list(known)

    def check(self, value: str) -> str:
        """The value, if it is known.

        Raises:
            ValueError: it is not; the message names the nearest key and all of them.
        """
        if value in self.names:
            return value
        near = difflib.get_close_matches(value, self.names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown {self.what} {value!r}: {hint}allowed here: {', '.join(self.names)}")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A string and then the check, whatever the annotated type."""
        return core_schema.no_info_after_validator_function(self.check, core_schema.str_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """A string with its allowed values."""
        return {"type": "string", "enum": self.names}


def share_of(text: str) -> float | None:
    """The number that a percentage such as "20%" is: 0.2; None for what is no percentage."""
    try:
        return float(Decimal(text.strip().removesuffix("%")) / 100) if text.strip().endswith("%") else None
    except InvalidOperation:
        return None


def percent_meant(ratio: float) -> str:
    """What to ask where a ratio is too large and reads like a percentage; empty elsewhere."""
    return f": did you mean {ratio:g}% or {ratio / 100:g}?" if 2 <= ratio < 100 else ""


def _share(value: Any) -> Any:
    share = share_of(value) if isinstance(value, str) else None
    return value if share is None else share


Ratio = Annotated[float, BeforeValidator(_share)]
"""A number, or a percentage such as 20%."""


class Strict(BaseModel):
    """Unknown keys are refused, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)
