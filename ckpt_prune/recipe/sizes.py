"""Sizes that a model shall have, as users write them: 5.0B parameters, 9.5GB, 850 GFLOPs, 12ms, 50% of the dense."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.fields import Strict
from ckpt_prune.common.formatting import decimal_bytes
from ckpt_prune.model.cost_record import Cost

SizeKind = Literal["params", "bytes", "flops", "latency"]


@dataclass(frozen=True)
class Timed:
    """The work that a latency is measured of.

    Attributes:
        tokens: of the text that is read; None for as many as a benchmark takes.
        single: one more token after it, with the keys and values of the text, instead of reading the text.
    """

    tokens: int | None = None
    single: bool = False

    @property
    def words(self) -> str:
        text = "" if self.tokens is None else f" of {self.tokens} tokens"
        if self.single:
            return f"a single token after a text{text}" if text else "a single token"
        return f"a text{text}" if text else "one pass"


@dataclass(frozen=True)
class Size:
    """A number of at least 1, or a share of what the dense model has: exactly one of the two.

    A share is exact, so that 29 % of 100 is 29.
    """

    value: int | None = None
    share: Fraction | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.share is None):
            raise ValueError("a size is either a number or a share")

    def of(self, dense: int) -> int:
        """Return the size as a number for a dense model of size `dense`; a share is rounded down."""
        if self.share is not None:
            return floor(self.share * dense)
        assert self.value is not None
        return self.value


@dataclass(frozen=True)
class _Unit:
    """How sizes of one kind are written.

    Attributes:
        what: the kind in messages.
        scales: suffix in lower case → its factor; "" for a plain number.
        allowed: examples for messages.
    """

    what: str
    scales: dict[str, int]
    allowed: str


def _powers(prefixes: str, base: int, ending: str) -> dict[str, int]:
    return {f"{prefix}{ending}": base ** (power + 1) for power, prefix in enumerate(prefixes)}


_FLOPS = {"": 1} | _powers("kmgtp", 1000, "")
_UNITS: dict[SizeKind, _Unit] = {
    "params": _Unit("parameters", {"": 1} | _powers("kmbt", 1000, ""), "5.0B (K, M, B or T), 5000000000"),
    "bytes": _Unit(
        "bytes",
        {"": 1, "b": 1} | _powers("kmgtp", 1000, "") | _powers("kmgtp", 1000, "b") | _powers("kmgtp", 1024, "ib"),
        "9.5GB or 9.5G (KB to PB), 9.5GiB (KiB to PiB), 10000000000",
    ),
    "flops": _Unit(
        "FLOPs",
        {f"{prefix}{ending}": scale for prefix, scale in _FLOPS.items() for ending in ("", "flop", "flops")},
        "2.3T (K, M, G, T or P, with or without FLOPs), 2300000000000",
    ),
    "latency": _Unit("latency", {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}, "12ms (ns, us, ms or s)"),
}
_FEWEST_BYTES = 1000
"""Fewer, without K or M, are a slip: no file of a model is as small."""
_TIMED = re.compile(r"(?:(?P<prompt>\d{1,7})|(?P<token>token)(?::(?P<after>\d{1,7}))?)", re.ASCII)
_GROUPED = r"\d{1,3}(?P<gap>[_, ])\d{3}(?:(?P=gap)\d{3}){0,8}"
_PLAIN = r"\d{1,30}(?:\.\d{1,30})?(?:e\+?\d{1,2})?"
_SIZE = re.compile(rf"(?:(?P<grouped>{_GROUPED})|(?P<plain>{_PLAIN})) ?(?P<suffix>%|[a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(kind: SizeKind, text: str) -> Size:
    """Read a size; ValueError says what is allowed.

    Case does not matter, and a space may stand before the unit. Of bytes, K to P and KB to PB are decimal, KiB to PiB
    binary. `_`, `,` and spaces may separate thousands of a number without a suffix. With a suffix they may not: 9,5GiB
    could be 95 or 9.5. A size that is not a whole number is rounded down. A latency is in nanoseconds; after an @ may
    follow what it is of (`timed`).
    """
    unit = _UNITS[kind]
    if kind == "latency":
        parse_timed(text)
        text = text.partition("@")[0]
    match = _SIZE.fullmatch(text.strip())
    suffix = match["suffix"].lower() if match is not None else ""
    scale = unit.scales.get(suffix)
    if match is None or (scale is None and suffix != "%") or (match["grouped"] and scale != 1):
        noun = "time" if kind == "latency" else f"size in {unit.what}"
        raise ValueError(f"{text!r} is not a {noun}: allowed are {unit.allowed}, or a share of the dense model: 50%")
    number = Fraction(match["plain"] or match["grouped"].replace(match["gap"], ""))
    if scale is None:
        if not 0 < number <= 100:
            raise ValueError(f"{text!r} is not a share of the dense model: above 0% and at most 100% is allowed")
        return Size(share=number / 100)
    if not suffix and 0 < number < 1:
        raise ValueError(
            f"{text!r} is no size in {unit.what}: did you mean {float(100 * number):g}%, a share of the dense model?"
        )
    if scale == 1 and number.denominator != 1:
        raise ValueError(
            f"{text!r} is no whole number of {unit.what}: is a suffix missing? Allowed are {unit.allowed}, or a share "
            "of the dense model: 50%"
        )
    if number * scale < 1:
        if kind == "latency":
            raise ValueError(f"{text!r} comes to less than 1ns: no model runs in so short a time")
        raise ValueError(f"{text!r} comes to less than 1: nothing of the model would be left")
    if kind == "bytes" and scale == 1 and number < _FEWEST_BYTES:
        share = f" or {number}%, a share of the dense model" if number <= 100 else ""
        raise ValueError(f"{text!r} is {number} bytes: did you mean {number}MB{share}?")
    return Size(value=floor(number * scale))


def parse_timed(text: str) -> Timed:
    """Read what a latency is of, after an @: 512 for a text of so many tokens, token or token:512 for one more token.

    ValueError if it is neither.
    """
    _, amount, of = text.strip().partition("@")
    match = _TIMED.fullmatch(of)
    if not amount:
        return Timed()
    tokens = None if match is None else match["prompt"] or match["after"]
    if match is None or (tokens is not None and int(tokens) < 1):
        raise ValueError(
            f"{text!r}: after the @ say what to time: 512 for a text of 512 tokens, token for a single token, or "
            "token:512 for a single token after 512"
        )
    return Timed(None if tokens is None else int(tokens), match["token"] is not None)


def _as_text(value: Any) -> Any:
    """Return the text of a number: YAML reads 5e9 and 5000000000 as numbers. Other values stay as they are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


SizeText = Annotated[str, BeforeValidator(_as_text), WithJsonSchema({"type": ["string", "number"]})]


class TargetSize(Strict):
    """The most that the pruned model may come to: exactly one of parameters, bytes, FLOPs and latency.

    It is written as it was read: `{"params": "5.0B"}`. A number becomes its text.
    """

    params: SizeText | None = Field(None, description="Parameters: 5.0B, 5_000_000_000, or 50% of the dense model's.")
    bytes: SizeText | None = Field(None, description="Bytes of tensors on disk: 9.5GB, 9.5GiB, or 50%.")
    flops: SizeText | None = Field(None, description="FLOPs of one forward pass, as inspect counts: 2.3T, or 50%.")
    latency: SizeText | None = Field(
        None,
        description="Time on this machine, as a table of its blocks foresees it: 12ms, or 50%; 50%@512 for reading 512 "
        "tokens, 50%@token for a single token.",
    )

    @field_validator("params", "bytes", "flops", "latency")
    @classmethod
    def _is_size(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None:
            return None
        parse_size(cast(SizeKind, info.field_name), text)
        return text.strip()

    @model_validator(mode="after")
    def _exactly_one(self) -> "TargetSize":
        if len(self._list_texts()) != 1:
            raise ValueError("a target size has exactly one of params, bytes, flops and latency: {params: 5.0B}")
        return self

    @model_serializer
    def _list_texts(self) -> dict[str, str]:
        texts = {"params": self.params, "bytes": self.bytes, "flops": self.flops, "latency": self.latency}
        return {kind: text for kind, text in texts.items() if text is not None}

    @property
    def kind(self) -> SizeKind:
        return cast(SizeKind, next(iter(self._list_texts())))

    @property
    def text(self) -> str:
        return self._list_texts()[self.kind]

    @property
    def words(self) -> str:
        """The size in a message: 5.0B parameters, or 70% of the parameters."""
        amount, _, _ = self.text.partition("@")
        what = _UNITS[self.kind].what
        if self.kind == "latency":
            what += f" of {parse_timed(self.text).words}"
        if self.kind == "bytes" and not amount.endswith("%") and amount[-1].isalpha():
            return amount  # 10GB
        return f"{amount} {'of the ' if amount.endswith('%') else ''}{what}"

    @property
    def share_meant(self) -> str:
        """A question, if the size is a bare number that looks like a percentage; else empty."""
        bare = self.text.isascii() and self.text.isdigit() and int(self.text) <= 100
        return f": did you mean {self.text}%?" if bare else ""

    @property
    def timed(self) -> Timed:
        return parse_timed(self.text)

    def of(self, dense: int) -> int:
        """Return the size as a number for a dense model of size `dense`."""
        return parse_size(self.kind, self.text).of(dense)


def cost_in(kind: SizeKind, cost: Cost) -> int:
    """Return the part of a cost that a size of this kind means. A latency is none: a table of the machine has it."""
    return {"params": cost.parameters, "bytes": cost.bytes, "flops": cost.flops}[kind]


def size_words(kind: SizeKind, value: float) -> str:
    if kind == "bytes":
        return decimal_bytes(value)
    return f"{value / 1e6:.4g} ms" if kind == "latency" else f"{value:,.0f}"


def asked_size(given: Mapping[str, str | None], ratio: float | None) -> dict[str, str] | None:
    """Return the size that options ask for, in the form of a recipe's key, or None.

    Two sizes, a size besides --ratio, and a text that is no size are refused.

    Args:
        given: kind → size, as options have them.
        ratio: of --ratio.
    """
    sizes = {kind: text for kind, text in given.items() if text is not None}
    named = [*(f"--target-{kind}" for kind in sizes), *(["--ratio"] if ratio is not None else [])]
    if sizes and len(named) > 1:
        raise UserError(f"{named[0]} and {named[1]} both say how much goes: give one")
    for kind, text in sizes.items():
        try:
            parse_size(kind, text)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"--target-{kind} {text}: {error}") from error
    return sizes or None


def small_share_line(sizes: Mapping[str, str | None]) -> str | None:
    """Say what a share of less than half keeps, as who asks for 30% may mean 30% smaller; else return None.

    Args:
        sizes: kind → size, as options have them; each can be read.
    """
    for kind, text in sizes.items():
        if text is None:
            continue
        size_kind = cast(SizeKind, kind)
        share = parse_size(size_kind, text).share
        if share is not None and share < Fraction(1, 2):
            amount, at, work = text.partition("@")
            less = "shorter" if kind == "latency" else "smaller"
            return (
                f"--target-{kind} {text} keeps {amount} of the {_UNITS[size_kind].what}; to make it "
                f"{amount} {less} say {float(100 * (1 - share)):g}%{at}{work}"
            )
    return None
