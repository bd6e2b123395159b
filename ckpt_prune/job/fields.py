"""What the models of a recipe share: strictness, and strings that must be keys of a registry."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
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


class Strict(BaseModel):
    """Unknown keys are refused, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)
