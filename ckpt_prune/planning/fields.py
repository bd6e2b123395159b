"""What the models of a recipe share: strictness, and strings that must be keys of a registry."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema


def one_of(what: str, known: Iterable[str]) -> Any:
    """A string that must be a key of a registry, with the registry's keys in errors and in the JSON Schema."""
    names = list(known)

    def check(value: str) -> str:
        if value in names:
            return value
        near = difflib.get_close_matches(value, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown {what} {value!r}: {hint}allowed here: {', '.join(names)}")

    return Annotated[str, AfterValidator(check), WithJsonSchema({"type": "string", "enum": names})]


class Strict(BaseModel):
    """Unknown keys are refused, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)
