"""Parts of pydantic models: strictness, and strings that must be keys of a registry."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ckpt_prune.common.similar_names import did_you_mean


class OneOf:
    """Annotates a string that must be a key of a registry: `Annotated[str, OneOf("score", SCORES)]`.

    Errors and the JSON Schema list the keys.
    """

    def __init__(self, what: str, known: Iterable[str]):
        self.what = what
        self.names = list(known)

    def check(self, value: str) -> str:
        if value in self.names:
            return value
        hint = did_you_mean(value, self.names)
        raise ValueError(f"unknown {self.what} {value!r}: {hint}allowed here: {', '.join(self.names)}")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, core_schema.str_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "enum": self.names}


class Strict(BaseModel):
    """Unknown keys are refused, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class Frozen(BaseModel):
    """Nothing changes once it is made."""

    model_config = ConfigDict(frozen=True)
