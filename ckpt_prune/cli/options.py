"""Options shared by commands, some of them generated from the pydantic models that say what the library takes."""

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, Field
from pydantic_core import PydanticUndefined

from ckpt_prune.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


class CalibrationOptions(BaseModel):
    """Which windows of which text to calibrate on."""

    text: tuple[Path, ...] = Field((), description="Text file to calibrate on (.txt or .jsonl); may be repeated.")
    samples: int = Field(128, ge=1, description="Number of windows.")
    window: int | None = Field(
        None, ge=2, description="Tokens per window. [default: the model's context length, at most 2048]"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Of the random choice of windows.")
    choose: Literal["random", "first"] = Field(
        "random",
        description="random: windows from all over the text; first: from its start, as several papers' code does.",
    )
    bos: Literal["auto", "always", "never"] = Field(
        "auto", description="Begin-of-sequence token before the stream; auto: where the tokenizer itself adds one."
    )
    folds: int | None = Field(
        None,
        ge=1,
        description="Keep moments apart for this many runs of windows, for recipes that choose lambda by folds. "
        "[default: 1, or 4 where the recipe needs folds]",
    )
    compute_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type the model runs in while it is measured."
    )


class EvaluationOptions(BaseModel):
    """What to measure a model on."""

    text: tuple[Path, ...] = Field((), description="Text file to measure perplexity on; may be repeated.")
    window: int | None = Field(None, ge=2, description="Tokens per window; needed with --text.")
    limit: int | None = Field(None, ge=1, description="Use only this many windows (or examples of a task).")
    bos: Literal["auto", "always", "never"] = Field(
        "auto", description="Begin-of-sequence token before the stream; auto: where the tokenizer itself adds one."
    )


def options_of(model: type[BaseModel]) -> Callable[[F], F]:
    """Give a command one click option per field of a pydantic model, types, limits, defaults and help included."""

    def decorate(function: F) -> F:
        for name, field in reversed(model.model_fields.items()):
            function = click.option(
                f"--{name.replace('_', '-')}", name, help=field.description, **_click_arguments(field)
            )(function)
        return function

    return decorate


def _click_arguments(field: Any) -> dict[str, Any]:
    annotation, origin = field.annotation, get_origin(field.annotation)
    if origin in (Union, types.UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
        origin = get_origin(annotation)
    default = None if field.default is PydanticUndefined else field.default
    arguments: dict[str, Any] = {"default": default, "show_default": default not in (None, ())}
    minimum = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    maximum = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    if origin is tuple:
        return arguments | {"type": _click_type(get_args(annotation)[0]), "multiple": True}
    if origin is Literal:
        return arguments | {"type": click.Choice(get_args(annotation))}
    if annotation is int and minimum is not None:
        return arguments | {"type": click.IntRange(min=minimum, max=maximum)}
    return arguments | {"type": _click_type(annotation)}


def _click_type(annotation: Any) -> Any:
    return click.Path(path_type=Path) if annotation is Path else annotation


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
device_option = click.option(
    "--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:i]", help="Where the work is done."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing output.")
recipe_option = click.option("--recipe", metavar="R", help="Name of a shipped recipe, or a recipe file.")


def _ratio(_ctx: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    # `not` catches NaN as well.
    if value is not None and not 0 <= value < 1:
        raise UserError(f"--ratio {value:g}: a ratio is in [0, 1)")
    return value


ratio_option = click.option(
    "--ratio",
    type=float,
    callback=_ratio,
    help="Share of units to drop in every space, in place of the recipe's.",
)
container_option = click.option(
    "--container", help="Force what the output is stored as: a stock model_type, or remote for remote code."
)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the recipe, dotted; may be repeated.",
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
