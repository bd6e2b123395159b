"""Base classes for the contents of this tool's files: pydantic models, strict when written and tolerant when read.

A file may come from another version, or be damaged. When one is read, unknown keys are kept, and a value that should be
a number and is not one counts as missing. Anything else that does not fit is an error that names its place.
"""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

_READING = "reading"
_HUGE = 1e300
_ABSENT: tuple[Any, ...] = (None, [], {})


def _number(value: Any) -> float | None:
    """Return a finite number unchanged, and None for anything else."""
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
"""A number, or None. When a file is read, anything but a finite number becomes None."""
Amount = Annotated[int | None, BeforeValidator(_amount)]
"""A whole number or None, in the same way."""
Count = Annotated[int, Field(ge=0, le=2**63)]
Block = Annotated[int, Field(ge=0, le=10**6)]
"""Index of a block, or a number of blocks."""


class Record(BaseModel):
    """A record that may hold any keys, in the order given."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def read(cls, values: Any) -> Self:
        """Build the record from a file's values. Raises pydantic's ValidationError."""
        return cls.model_validate(values, context=_READING)

    @property
    def entries(self) -> Mapping[str, Any]:
        """Values under keys that the class does not declare."""
        return self.model_extra or {}

    def figure(self, key: str) -> float | None:
        """Return the finite number under a key, or None."""
        value = _number(getattr(self, key, None))
        return None if value is None else float(value)

    def amount(self, key: str) -> int | None:
        """Return the whole number under a key, or None."""
        value = self.figure(key)
        return int(value) if value is not None and value == int(value) else None

    def text(self, key: str) -> str | None:
        """Return the text under a key, or None."""
        value = getattr(self, key, None)
        return value if isinstance(value, str) else None


class FixedRecord(Record):
    """A record with the keys of its class only, unless a file that is read has more.

    Attributes:
        optional: keys that a file lacks if they are None or empty.
        as_given: whether a file lacks every key that was not given.
    """

    optional: ClassVar[frozenset[str]] = frozenset()
    as_given: ClassVar[bool] = False

    @model_validator(mode="after")
    def _refuse_unknown(self, info: ValidationInfo) -> Self:
        unknown = [key for key in self.entries if key not in self.more_keys()]
        if unknown and info.context != _READING:
            raise ValueError(f"unknown key {unknown[0]!r}")
        return self

    @classmethod
    @cache
    def _all_optional(cls) -> frozenset[str]:
        return frozenset().union(*(base.__dict__.get("optional", ()) for base in cls.__mro__))

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        if self.as_given:
            values = {key: value for key, value in values.items() if key in self.model_fields_set}
        return {key: value for key, value in values.items() if key not in self._all_optional() or value not in _ABSENT}

    @classmethod
    def more_keys(cls) -> Collection[str]:
        """Return keys that the class does not declare and that are known all the same."""
        return ()
