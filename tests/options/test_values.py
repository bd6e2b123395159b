"""Values that no option takes are refused in one line that names the option, from the shell and from Python alike."""

import inspect
from typing import Any, Literal, get_args, get_origin

import pytest

from ckpt_prune.cli.command import _plain_type
from ckpt_prune.options import commands
from ckpt_prune.options.option import Options, check_options, flags_of
from tests.refusals import refusal

KINDS = [
    kind
    for name, kind in vars(commands).items()
    if inspect.isclass(kind) and issubclass(kind, Options) and kind.__module__ == commands.__name__
]
REQUIRED = {"format": "int8", "values": "0.1:0.3:0.1"}


def wrong_values(field: Any) -> list[str]:
    kind = _plain_type(field.annotation)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return ["nonsense"]
    outside = [
        str(getattr(limit, name) + step)
        for limit in field.metadata
        for name, step in {"ge": -1, "gt": 0, "le": 1, "lt": 0}.items()
        if hasattr(limit, name)
    ]
    if kind is float:
        return [*outside, "nan", "inf", "fast"]
    return [*outside, "1.5", "many"] if kind is int else []


CASES = {
    (flags_of(name, field)[-1], value): (kind, name)
    for kind in KINDS
    for name, field in kind.model_fields.items()
    for value in wrong_values(field)
}


def test_limits_are_found():
    assert {
        ("--samples", "0"),
        ("--lr", "0"),
        ("--opset", "17"),
        ("--opset", "24"),
        ("--held-out", "1"),
    } <= CASES.keys()


@pytest.mark.parametrize(("flag", "value"), CASES)
def test_values_that_no_option_takes(flag, value):
    kind, name = CASES[flag, value]
    given = {key: REQUIRED.get(key, "x") for key, field in kind.model_fields.items() if field.is_required()}
    line = refusal(check_options, kind, given | {name: value})
    assert line.startswith((f"{flag} {value}: ", f"{flag}: {value} is "))
    assert "Input should" not in line
