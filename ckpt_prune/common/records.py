"""What files of this tool hold, as pydantic models: strict where they are made, patient where they are read.

A file may come from another version, or be damaged. What a reader does not know is kept beside what it knows; a number
that is none is missing. Everything else that does not fit is an error that names its place.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

_READING = "reading"
_HUGE = 1e300


def _number(value: Any) -> float | None:
    """A number as it is; None for what is no number, or not a finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _HUGE:
        return None
    return value


def _figure(value: Any, info: ValidationInfo) -> Any:
    return _number(value) if info.context == _READING else value


def _amount(value: Any, info: ValidationInfo) -> Any:
    if info.context != _READING:
        return value
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


Figure = Annotated[float | None, BeforeValidator(_figure)]
"""A number, or None where there is none; read from a file, also where it is not a finite number."""
Amount = Annotated[int | None, BeforeValidator(_amount)]
"""A whole number, in the same way."""
Count = Annotated[int, Field(ge=0, le=2**63)]
Block = Annotated[int, Field(ge=0, le=10**6)]
"""Index of a block, or a number of blocks."""


class Record(BaseModel):
    """Entries under any keys, in the order given."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def read(cls, values: Any) -> Self:
        """The record in a file's values.

        Raises:
            ValidationError: something does not fit.
        """
        return cls.model_validate(values, context=_READING)

    @property
    def entries(self) -> Mapping[str, Any]:
        """What is under keys that the class does not declare."""
        return self.model_extra or {}

    def figure(self, key: str) -> float | None:
        """The number under any key; None where it is absent, null, no number or not a finite one."""
        value = _number(getattr(self, key, None))
        return None if value is None else float(value)

    def amount(self, key: str) -> int | None:
        """The whole number under any key, or None."""
        value = self.figure(key)
        return int(value) if value is not None and value == int(value) else None

    def text(self, key: str) -> str | None:
        """The text under any key, or None."""
        value = getattr(self, key, None)
        return value if isinstance(value, str) else None


class Fixed(Record):
    """A record whose keys are its class's, unless it is read from a file that knows more."""

    @model_validator(mode="after")
    def _no_other(self, info: ValidationInfo) -> Self:
        if self.model_extra and info.context != _READING:
            raise ValueError(f"unknown key {next(iter(self.model_extra))!r}")
        return self
