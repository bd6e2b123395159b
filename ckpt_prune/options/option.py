"""The parts of a class of options.

`api/function.py` makes a Python function from such a class, and `cli/command.py` a command. The string below an option
explains it in both. A type checker knows the options of the function, too.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    Self,
    TypeVar,
    dataclass_transform,
)

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ckpt_prune.checkpoint.files import check_place
from ckpt_prune.checkpoint.model_folder import find_local_folder
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.ratios import check_ratio
from ckpt_prune.common.similar_names import ask_for_sibling
from ckpt_prune.common.value_words import explain_value, message_of

Given = TypeVar("Given")
Kept = TypeVar("Kept")

if TYPE_CHECKING:

    class Accepts(Generic[Given, Kept]):
        """An option that is given as one type and kept as another: type checkers see both."""

        def __get__(self, instance: object, owner: object = None) -> Kept: ...

        def __set__(self, instance: object, value: Given) -> None: ...

else:

    class Accepts:
        """An option that is given as one type and kept as another: pydantic sees the second."""

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[1]


Digest = Literal["value", "content", "none"]


@dataclass(frozen=True)
class Shell:
    """How an option is written on the command line, if that is not `--` and its name.

    Attributes:
        flags: such as ("-o", "--output").
        metavar: the word that stands for a value in `--help`.
        several: True if the option may be repeated.
        shown: False if only Python has the option.
        group: its group, if that is not the one of its class.
        needs: name of an option without which this one means nothing.
        digest: what of it is in the digest of a job, which a resumed run must share with the one it continues: its
            value; the content of what it names (a file, a model, a device), whatever its name; or none, because nothing
            that is written depends on it.
    """

    flags: tuple[str, ...] = ()
    metavar: str | None = None
    several: bool = False
    shown: bool = True
    group: str | None = None
    needs: str | None = None
    digest: Digest = "value"

    def __call__(self, schema: dict[str, Any]) -> None:
        """Leave the JSON Schema of recipes as it is; pydantic calls this with it."""


def option(
    *,
    default: Any = ...,
    default_factory: Any = None,
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
    several: bool = False,
    shown: bool = True,
    group: str | None = None,
    needs: str | None = None,
    digest: Digest = "value",
    kw_only: bool = True,
    **checks: Any,
) -> Any:
    """State an option.

    Args:
        default: used if the option is not given; without one, the option is required.
        default_factory: makes the default from the options before it; they are a mapping.
        flags: as in `Shell`, like metavar, several, shown, group, needs and digest.
        kw_only: False for an argument, which is given without its name.
        checks: limits, as pydantic's `Field` takes them.
    """
    how = {"default": default} if default_factory is None else {"default_factory": default_factory}
    return Field(
        json_schema_extra=Shell(flags, metavar, several, shown, group, needs, digest),
        kw_only=kw_only,
        **how,
        **checks,
    )


MODEL, RECIPE, SIZE, TRAINING, DATA, MEASURE = "Model", "What to prune", "Size", "Training", "Data", "What to measure"
GRAPH, TIMING, SWEEP, ROUNDING = "Graph", "Timing", "Sweep", "Rounding"
HUB, CARD, OUTPUT, MACHINE = "Hub", "Card", "Output", "Machine"
GROUPS = (MODEL, RECIPE, SIZE, TRAINING, DATA, MEASURE, GRAPH, TIMING, SWEEP, ROUNDING, HUB, CARD, OUTPUT, MACHINE)
"""Titles of groups of options, in the order of `--help`."""


@dataclass_transform(kw_only_default=True, field_specifiers=(option,))
class Options(BaseModel):
    """A class of options. The options of a command are one class, made of several of these."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, frozen=False, use_attribute_docstrings=True, defer_build=True
    )
    group: ClassVar[str] = OUTPUT
    """Title of the options' group in `--help`."""
    progress: bool = option(default=True, shown=False, digest="none")
    """Show progress bars and notices on stderr."""

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for name in self.model_fields_set:
            field = type(self).model_fields[name]
            needed = shell_of(field).needs
            if needed is not None and getattr(self, name) != field.default and not getattr(self, needed):
                raise ValueError(f"{flags_of(name, field)[-1]} goes with --{needed.replace('_', '-')}")
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in self.model_fields_set:
            field = type(self).model_fields[name]
            if (shell_of(field).metavar or "").endswith(("=VALUE", "=SIZE")):
                keys = [value.partition("=")[0].strip() for value in getattr(self, name)]
                if twice := next((key for key in keys if keys.count(key) > 1), None):
                    raise ValueError(f"{flags_of(name, field)[-1]} {twice} is given more than once")
        return self


def digested_options(options: Options) -> dict[str, Any]:
    """Return as JSON the options whose values the output depends on; a resumed run must have the same."""
    names = {name for name, field in type(options).model_fields.items() if shell_of(field).digest == "value"}
    return options.model_dump(mode="json", include=names)


def words_of_options(options: Options, names: Iterable[str]) -> list[str]:
    """Return options of these names, but those that have their defaults, as words of a command line."""
    words: list[str] = []
    for name in names:
        field, value = type(options).model_fields[name], getattr(options, name)
        if value == field.default:
            continue
        flag = [flags_of(name, field)[-1]] if field.kw_only else []
        for each in value if isinstance(value, tuple) else (value,):
            words += flag if each is True else [*flag, str(each)]
    return words


T = TypeVar("T", bound=BaseModel)


def check_options(kind: type[T], given: Mapping[str, Any]) -> T:
    """Make options from values, by name. UserError names the option as the command line does."""
    fields = kind.model_fields
    for name, value in given.items():
        if any("\0" in str(each) for each in (value if isinstance(value, tuple | list) else (value,))):
            by_name = name in fields and fields[name].kw_only
            flag = flags_of(name, fields[name])[-1] if by_name else name.upper()
            raise UserError(f"{flag} holds a null character, which no name of a file has: give another")
    defaulted = {
        name for name, field in fields.items() if field.default_factory is not None and given.get(name) is None
    }
    try:
        return kind(**{name: value for name, value in given.items() if name not in defaulted})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:  # a check of several options, which names them
            raise UserError(message_of(first)) from error
        name = str(first["loc"][0])
        flag = flags_of(name, fields[name])[-1] if name in fields else f"--{name}"
        explained = explain_value(first)
        if explained is not None:
            raise UserError(f"{flag}: {explained}") from error
        refusal = first.get("ctx", {}).get("error")
        value = refusal.path if isinstance(refusal, _BadPathError) else first["input"]
        raise UserError(f"{flag} {value}: {message_of(first)}") from error


def flags_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return how an option is written on the command line."""
    return shell_of(field).flags or (f"--{name.replace('_', '-')}",)


def joins_values(field: FieldInfo) -> bool:
    """Return whether values of an option are kept with commas between them, so that it may also be repeated."""
    return any(isinstance(each, BeforeValidator) and each.func is with_commas for each in field.metadata)


def shell_of(field: FieldInfo) -> Shell:
    """Return how an option is written on the command line, if that is not by its name."""
    assert isinstance(field.json_schema_extra, Shell)
    return field.json_schema_extra


def same_option(kind: type[BaseModel], name: str) -> Any:
    """Return an option of another class, for a class that has it, too."""
    return kind.model_fields[name]


def defining_class(kind: type[BaseModel], name: str) -> Any:
    """Return the class of options that states an option of `kind`."""
    return next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))


def select_options(options: BaseModel, kind: type[T]) -> T:
    """Return the options that one class states, out of more."""
    return kind.model_validate({name: getattr(options, name) for name in kind.model_fields})


# ---- types of options: what is given, and what is kept of it ------------------------------------------------


class HasPath(Protocol):
    """A result with a folder: it stands for that folder wherever one is asked for."""

    @property
    def path(self) -> os.PathLike[str]:
        """The folder."""


class HasFolder(Protocol):
    """Statistics: they stand for their folder."""

    @property
    def folder(self) -> os.PathLike[str]:
        """The folder."""


AnyPath = str | os.PathLike[str]
AnyModel = AnyPath | HasPath


def as_tuple(value: Any) -> Any:
    """Make a tuple of a single value, so that one and several are both accepted."""
    return (value,) if isinstance(value, str | os.PathLike) else value


def path_of(value: Any) -> Any:
    """Return the folder of a result that has one (`path`, or `folder` of statistics), and other values as they are."""
    path = getattr(value, "path", getattr(value, "folder", value))
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def with_commas(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list | tuple | set | frozenset | range) else value


def _changes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(f"{key}={json.dumps(each)}" for key, each in value.items())
    return as_tuple(value)


def _read_ratio(value: Any) -> Any:
    try:
        return check_ratio(float(value) if isinstance(value, str) and not value.strip().endswith("%") else value)
    except ValueError:
        return value  # pydantic says what is wrong with it


def _check_output_place(path: Path) -> Path:
    check_place(path)  # before the libraries are loaded, which takes seconds
    return path


def _check_exists(path: Path | None) -> Path | None:
    if path is not None and not path.exists():
        raise ValueError(f"there is no such file or folder{ask_for_sibling(path, Path.exists)}")
    return path


class _BadPathError(ValueError):
    """One of several files or folders that an option was given is refused."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


def _check_all_exist(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    for at, path in enumerate(paths):
        try:
            _check_exists(path)
        except ValueError as error:
            raise _BadPathError(path, str(error)) from error
        if path in paths[:at]:
            raise _BadPathError(path, "it is named twice")
    return paths


def check_model(model: str | None) -> str | None:
    if model is not None:
        find_local_folder(model)
    return model


Texts = Annotated[Accepts[AnyPath | Sequence[AnyPath], tuple[Path, ...]], BeforeValidator(as_tuple)]
"""Files, or one of them."""
File = Accepts[AnyPath | None, Path | None]
"""A file or folder, or None."""
Input = Annotated[File, AfterValidator(_check_exists)]
"""A file or folder that is read, or None. It is refused at once if it is not there."""
Inputs = Annotated[Texts, AfterValidator(_check_all_exist)]
"""Files or folders that are read, or one. One that is not there, or is named twice, is refused at once."""
Folder = Annotated[Accepts[AnyModel, str], BeforeValidator(path_of)]
"""A folder, or a result that has one."""
AnyFolder = Annotated[Accepts[AnyModel | None, str | None], BeforeValidator(path_of)]
"""The same, or None."""
Model = Annotated[Accepts[AnyModel, str], BeforeValidator(path_of), AfterValidator(check_model)]
"""A folder, a Hub id, or a result that has a folder."""
OtherModel = Annotated[Accepts[AnyModel | None, str | None], BeforeValidator(path_of), AfterValidator(check_model)]
"""The same, or None."""
StatisticsFolder = Annotated[Accepts[AnyModel | HasFolder | None, Path | None], BeforeValidator(path_of)]
"""A folder of statistics, or what `calibrate` returned."""
Place = Annotated[Accepts[AnyPath, Path], AfterValidator(_check_output_place)]
"""A folder to write. It is refused at once if it cannot be made."""
OtherPlace = Annotated[Accepts[AnyPath | None, Path], AfterValidator(_check_output_place)]
"""The same, which may be left out."""
Strings = Annotated[Accepts[str | Sequence[str], tuple[str, ...]], BeforeValidator(as_tuple)]
"""Strings, or one of them."""
Listed = Annotated[Accepts[str | Sequence[object] | None, str | None], BeforeValidator(with_commas)]
"""Values with commas between them, or a sequence of values."""
Changes = Annotated[Accepts[Mapping[str, object] | str | Sequence[str], tuple[str, ...]], BeforeValidator(_changes)]
"""Changes of a recipe: KEY=VALUE, or a mapping."""
AnyRatio = Annotated[Accepts[float | str | None, float | None], BeforeValidator(_read_ratio)]
"""A share in [0, 1): a number, or a percentage such as "20%"."""
