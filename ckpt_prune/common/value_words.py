"""Say in plain words what is wrong with a value, in place of pydantic's own sentences."""

import re
from collections.abc import Mapping
from typing import Any

from ckpt_prune.common.ratios import parse_ratio, suggest_percentage
from ckpt_prune.common.similar_names import did_you_mean

_WORDS = {
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_type": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "greater_than_equal": "is less than {ge:g}, the least that it can be",
    "less_than_equal": "is more than {le:g}, the most that it can be",
    "greater_than": "is not more than {gt:g}",
    "less_than": "is not less than {lt:g}",
}
"""Type of one of pydantic's errors → what it says of the value."""


def explain_value(error: Mapping[str, Any]) -> str | None:
    """Return what one of pydantic's errors says of a value, such as "4096x is not a whole number"; None of others.

    `error` is an entry of `ValidationError.errors()`.
    """
    value = error["input"]
    if error["type"] == "literal_error":
        names = [choice.strip("'") for choice in re.split(", | or ", error["ctx"]["expected"])]
        hint = did_you_mean(str(value), names).rstrip()
        return f"{value} is not {'one of ' * (len(names) > 1)}{', '.join(names)}{': ' * bool(hint)}{hint}"
    words, limits = _WORDS.get(error["type"]), error.get("ctx", {})
    meant = suggest_percentage(float(parse_ratio(value))) if error["type"] == "less_than" and limits["lt"] == 1 else ""
    return None if words is None else f"{value} {words.format_map(limits)}{meant}"


def message_of(error: Mapping[str, Any]) -> str:
    """Return pydantic's own sentence, or that of the check that refused the value."""
    message: str = error["msg"].removeprefix("Value error, ")
    return message
