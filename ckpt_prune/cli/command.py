"""Make a click command from a Python function of this package: the same options, checks and sentences."""

import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from ckpt_prune.api.function import group_of, ordered_options
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes, human_count
from ckpt_prune.common.progress import show_progress
from ckpt_prune.options.option import OUTPUT, Options, flags_of, joins_values, shell_of
from ckpt_prune.show.section import Table
from ckpt_prune.show.terminal import print_table

if TYPE_CHECKING:
    from ckpt_prune.model.cost_record import Cost

Result = Any
"""The value that a function of the package returns."""


class Command(click.Command):
    """The command of a function.

    Args:
        function: made by `api.function.takes`. Its docstring is the text of `--help`, without returns and raises.
        show: prints the function's result. It is given the result and the options that were given.
        examples: command lines for `--help`, without `ckpt-prune`.
        tables: title → rows that `--help` has before the examples.
        call: does all of the work instead: it is given the options by name, and whether to print JSON.
        data: makes of a result what `--json` prints, by default with its method `data`; None if there is no `--json`.
        options: the class of the command's options, if it is not that of the function.
        name: of the command, if it is not that of the function.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        show: Callable[[Result, dict[str, Any]], None] | None = None,
        *,
        examples: Sequence[str],
        tables: Mapping[str, Sequence[tuple[str, str]]] | None = None,
        call: Callable[[dict[str, Any], bool], None] | None = None,
        data: Callable[[Result], Any] | None = lambda result: result.data(),
        options: type[Options] | None = None,
        name: str | None = None,
    ) -> None:
        described: Any = function
        self.function, self.show, self.call, self.data, self.examples = function, show, call, data, examples
        self.tables = tables or {}
        self.options: type[Options] = options or described.options
        names = [name for name in ordered_options(self.options) if shell_of(self.options.model_fields[name]).shown]
        params: list[click.Parameter] = [_parameter(name, self.options.model_fields[name]) for name in names]
        if data is not None:
            params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object, not text."))
        super().__init__(name or function.__name__, params=params, callback=self._run, help=_for_shell(described.text))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the command line. UserError if an option that takes one value is given twice: click takes the last."""
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            for option in {each for each in order if order.count(each) > 1 and isinstance(each, click.Option)}:
                _check_repeated(option, set(args))
        return super().parse_args(ctx, args)

    def _run(self, *, as_json: bool = False, **given: Any) -> None:
        options = {name: value for name, value in given.items() if value is not None and value != ()}
        with show_progress(True):
            self._call(options, as_json)

    def _call(self, options: dict[str, Any], as_json: bool) -> None:
        if self.call is not None:
            self.call(options, as_json)
            return
        result = self.function(**options)
        if as_json and self.data is not None:
            echo_json(self.data(result))
        elif self.show is not None:
            self.show(result, options)
        if getattr(result, "passed", True) is False:
            click.get_current_context().exit(1)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group of options, and then tables and examples."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            field = self.options.model_fields.get(parameter.name or "")
            if isinstance(parameter, click.Argument):
                sections["Arguments"].append((parameter.make_metavar(ctx), str(field and field.description)))
                continue
            title = OUTPUT if field is None else group_of(self.options, str(parameter.name))
            sections.setdefault(title, []).append(parameter.get_help_record(ctx) or ("", ""))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        for title, lines in self.tables.items():
            with formatter.section(title):
                formatter.write_dl(lines, col_max=56)
        with formatter.section("Examples"):
            formatter.write("".join(f"{'':{formatter.current_indent}}ckpt-prune {line}\n" for line in self.examples))


def _check_repeated(option: click.Option, words: set[str]) -> None:
    """Refuse an option that is given twice and takes one value, or a flag that is turned both on and off."""
    if option.is_flag and words & {*option.opts} and words & {*option.secondary_opts}:
        raise UserError(f"{option.opts[-1]} and {option.secondary_opts[0]} contradict each other: give one of them")
    if not (option.is_flag or option.multiple):
        raise UserError(f"{' or '.join(option.opts)} is given more than once, and takes one value")


class _Choice(click.Choice[Any]):
    """One of several values; pydantic refuses all others."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return next((choice for choice in self.choices if str(choice) == value), value)


def _for_shell(text: str) -> str:
    paragraphs = text.split("\n\n")
    return "\n\n".join(each for each in paragraphs if not each.startswith(("Returns ", "Raises ")))


def _parameter(name: str, field: FieldInfo) -> click.Parameter:
    """Make the click parameter of an option. click only splits the command line: pydantic checks the values."""
    shell, kind = shell_of(field), _plain_type(field.annotation)
    if field.kw_only is False:
        count = -1 if get_origin(kind) is tuple else 1
        return click.Argument([name], metavar=shell.metavar, nargs=count, required=field.is_required())
    flags = flags_of(name, field)
    if kind is bool:
        long = f"{flags[-1]}/--no-{flags[-1][2:]}" if field.default is not False else flags[-1]
        shown = {True: f"{field.description} [default: on]"}.get(field.default, field.description)
        return click.Option([*flags[:-1], long, name], is_flag=True, default=None, help=shown)
    several = shell.several or get_origin(kind) is tuple or joins_values(field)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    help = field.description or ""
    if not field.is_required() and field.default_factory is None and field.default not in (None, ()):
        default = field.default[0] if isinstance(field.default, tuple) else field.default
        help += f" [default: {default}]"
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return click.Option(
        [*flags, name],
        multiple=several,
        required=field.is_required(),
        type=_Choice(choices) if choices else click.Path() if kind is Path else click.STRING,
        metavar=shell.metavar or (None if choices else {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")),
        help=help,
    )


def _plain_type(annotation: Any) -> Any:
    """Return a type without None, and without what is annotated to it."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    return annotation


def echo_json(value: Any) -> None:
    """Print a value as JSON, indented by two spaces."""
    click.echo(json.dumps(value, indent=2))


def table_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of rows that have the same columns, header → cell."""
    return print_table(Table(list(rows[0]), [list(row.values()) for row in rows]))


def size_cells(after: "Cost", before: "Cost") -> dict[str, str]:
    """Return the columns that say how large an output is."""
    return {
        "parameters": human_count(after.parameters),
        "share": f"{after.parameters / before.parameters:.1%}",
        "bytes": human_bytes(after.bytes),
        "FLOPs": human_count(after.flops),
    }


def figure(value: float | None, form: str = ".4f") -> str:
    """Return a figure, or a dash if it is not known."""
    return "-" if value is None else format(value, form)
