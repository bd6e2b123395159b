"""Options shared by commands, some of them generated from the pydantic models that say what the library takes."""

import json
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ckpt_prune.checkpoint.model_folder import find_local_folder
from ckpt_prune.common.ratios import Ratio, check_ratio, parse_percentage, parse_ratio
from ckpt_prune.options import Folder, OpeningOptions, PartName
from ckpt_prune.recipe.places import check_recipe
from ckpt_prune.recipe.shipped import DEFAULT_RECIPE

F = TypeVar("F", bound=Callable[..., Any])


def options_of(model: type[BaseModel]) -> Callable[[F], F]:
    """Give a command one click option per field of a pydantic model, types, limits, defaults and help included."""

    def decorate(function: F) -> F:
        for name, field in reversed(model.model_fields.items()):
            function = click.option(_option(name, field), name, help=field.description, **_click_arguments(field))(
                function
            )
        return function

    return decorate


def _option(name: str, field: Any) -> str:
    """The option of a field: `--name`, or `--name/--no-name` of one that is true, false or, perhaps, None."""
    option = f"--{name.replace('_', '-')}"
    return (
        f"{option}/{option.replace('--', '--no-')}"
        if bool in (field.annotation, *get_args(field.annotation))
        else option
    )


_LIMITS = ("ge", "gt", "le", "lt")


def _click_arguments(field: Any) -> dict[str, Any]:
    annotation, origin = field.annotation, get_origin(field.annotation)
    if origin in (Union, types.UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
        origin = get_origin(annotation)
    share = annotation == Ratio
    default = None if field.default is PydanticUndefined else field.default
    arguments: dict[str, Any] = {"default": default, "show_default": default not in (None, ())}
    limits = {name: next((getattr(m, name) for m in field.metadata if hasattr(m, name)), None) for name in _LIMITS}
    minimum = limits["ge"] if limits["gt"] is None else limits["gt"]
    maximum = limits["le"] if limits["lt"] is None else limits["lt"]
    if origin is tuple:
        return arguments | {"type": _click_type(get_args(annotation)[0]), "multiple": True}
    if origin is Literal:
        return arguments | {"type": click.Choice(get_args(annotation))}
    if annotation is int and minimum is not None:
        return arguments | {"type": click.IntRange(min=minimum, max=maximum)}
    if share or (annotation is float and minimum is not None):
        opened = {"min_open": limits["gt"] is not None, "max_open": limits["lt"] is not None}
        kind = _Share if share else _Number
        return arguments | {"type": kind(min=minimum, max=maximum, **opened)}
    if annotation == Folder:
        return arguments | {"type": str, "metavar": "MODEL"}
    return arguments | {"type": _click_type(annotation)}


def _click_type(annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    return click.Path(path_type=Path) if annotation is Path else annotation


class _Number(click.FloatRange):
    """A finite float within limits. Every comparison with nan being false, click lets it through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        if math.isinf(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class _Share(_Number):
    """A number, or a percentage such as 1%."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse."""
        return super().convert(parse_ratio(value), param, ctx)


state_memory_option = click.option(
    "--state-memory",
    type=_Number(min=0),
    default=8.0,
    show_default=True,
    metavar="GIB",
    help="Hidden states that are kept in memory, in GiB; what is more is memory-mapped in files beside OUT, which "
    "changes no result. They take samples x tokens x hidden x 4 bytes (2 with --compute-dtype bfloat16): of the model "
    "that is measured, and of both, dense and pruned, in recovery.",
)
after_option = click.option(
    "--perplexity-after",
    metavar="K,K,...|all",
    help="Also measure the perplexity on held-out windows with only the first K blocks recovered (causal language "
    "models; with none and with all is measured anyway). Each K keeps the hidden states of the held-out samples once "
    "more.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
device_option = click.option(
    "--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:i]", help="Where the work is done."
)
provider_option = click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    help="What onnxruntime runs on; where CUDA cannot be loaded, a line says so and the CPU is used. [default: what "
    "the graph is fused for, else cpu]",
)
public_option = click.option("--public", is_flag=True, help="Let all read what is pushed. [default: private]")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing output.")


def checked_model(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse what can be neither a folder nor a Hub id, before anything is imported."""
    if value is not None:
        find_local_folder(value)
    return value


def checked_recipe(_ctx: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Refuse an unknown recipe, or one of several, before anything is imported."""
    for each in (value,) if isinstance(value, str) else value or ():
        check_recipe(each)
    return value


RECIPE_HELP = (
    "Name of a shipped recipe, a recipe file or a folder with one, ORG/REPO/NAME.yaml[@REVISION] on the Hub, or an "
    "https address"
)
model_argument = click.argument("model", callback=checked_model)
recipe_option = click.option(
    "--recipe",
    metavar="R",
    callback=checked_recipe,
    help=f"{RECIPE_HELP}. [default: {DEFAULT_RECIPE}]",
)


def _ratio(_ctx: click.Context, _parameter: click.Parameter, value: float | None) -> Any:
    return check_ratio(value)


class _Ratio(click.types.FloatParamType):
    """A float, or a percentage such as 20%."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse."""
        share = parse_percentage(value) if isinstance(value, str) else None
        return float(super().convert(value, param, ctx)) if share is None else share


ratio_option = click.option(
    "--ratio",
    type=_Ratio(),
    callback=_ratio,
    help="Share of units to drop in every space, or of weights that a mask zeroes, in place of the recipe's: 0.2 or "
    "20%.",
)


def size_options(function: F) -> F:
    """`--target-params`, `--target-bytes`, `--target-flops` and `--target-latency`."""
    function = click.option(
        "--target-latency",
        metavar="TIME",
        help="Time on this machine to come down to, such as 12ms or 70%, as a table of its blocks, measured once, "
        "foresees it: of reading 128 tokens, or 70%@512 for so many, 70%@token for a single one after them.",
    )(function)
    for kind, example, what in (
        ("flops", "2.3T", "FLOPs of one forward pass (`ckpt-prune inspect`)"),
        ("bytes", "9.5GiB", "Bytes of the output's tensors on disk"),
        ("params", "5.0B", "Parameters"),
    ):
        function = click.option(
            f"--target-{kind}",
            metavar="SIZE",
            help=f"{what} to come down to, such as {example}, or a share of the dense model's such as 70%; in place "
            "of every ratio of the recipe. The widths are those of the recipe's allocation.",
        )(function)
    return function


container_option = click.option(
    "--container",
    help="What the output is stored as: a stock model_type, remote for remote code, any for remote code where nothing "
    "stock fits, or padded for a stock class with zeros where it has no narrower shape.",
)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the recipe, dotted; may be repeated.",
)


trust_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Accept a MODEL whose config.json or image processor asks for code of its own. The processor's is run where "
    "transformers has no such class; the model's is run by evaluate, export, validate and benchmark alone: all else "
    "uses the stock class of its model_type, if every tensor fits it. A tokenizer's never is, and code is not "
    "downloaded from the Hub.",
)


family_option = click.option(
    "--family",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=OpeningOptions.model_fields["family"].description,
)

part_option = click.option(
    "--part",
    type=click.Choice(get_args(PartName)),
    help=OpeningOptions.model_fields["part"].description,
)


def echo_json(value: Any) -> None:
    """Print a value as JSON, two spaces deep."""
    click.echo(json.dumps(value, indent=2))


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Columns padded to equal width: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), *(line(row) for row in rows)])
