"""Make a Python function from a class of options."""

import errno
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from textwrap import wrap
from typing import Any, ParamSpec, TypeVar

from pydantic_core import PydanticUndefined

from ckpt_prune.common.errors import GgufFileError, to_user_error
from ckpt_prune.common.progress import show_progress
from ckpt_prune.options.option import GROUPS, Options, check_options, defining_class, shell_of

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise UserError for an error of the system, and a better one for a GGUF file that `convert` does not take."""
    try:
        yield
    except GgufFileError as error:
        if find_spec("gguf") is not None:
            from ckpt_prune.gguf.source import refuse_as_model

            refuse_as_model(error.file)
        raise
    except OSError as error:
        if error.errno == errno.EPIPE:  # nobody reads what is printed: click ends the program
            raise
        raise to_user_error(error) from error


def takes(options: Callable[P, O]) -> Callable[[Callable[[O], R]], Callable[P, R]]:
    """Decorate a function of an options object, so that it is called with the options themselves.

    Signature, defaults and the Args of the docstring come from the class of options. A value that fails its check, and
    an error of the system, raise UserError.
    """

    def decorate(work: Callable[[O], R]) -> Callable[P, R]:
        kind: Any = options
        signature = signature_of(kind)

        @wraps(work)
        def function(*args: P.args, **given: P.kwargs) -> R:
            values = signature.bind(*args, **given).arguments
            with user_errors(), show_progress(values.get("progress", True)):
                return work(check_options(kind, values))

        described: Any = function
        described.options, described.text = kind, inspect.getdoc(work)
        described.__signature__ = signature.replace(return_annotation=inspect.signature(work).return_annotation)
        described.__doc__ = "\n".join([described.text, "", "Args:", *_describe_options(kind)])
        return function

    return decorate


def signature_of(kind: type[Options]) -> inspect.Signature:
    """Return the signature of a function of these options: arguments first, then the rest by name."""
    parameters = []
    for name in ordered_options(kind):
        field = kind.model_fields[name]
        default: Any = inspect.Parameter.empty
        if not field.is_required():
            default = None if field.default is PydanticUndefined else field.default
        where = inspect.Parameter.POSITIONAL_OR_KEYWORD if field.kw_only is False else inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, where, default=default))
    return inspect.Signature(parameters)


def ordered_options(kind: type[Options]) -> list[str]:
    """Return the names of options: arguments first, then by group, in each group required options first."""

    def place(name: str) -> tuple[bool, int, bool]:
        field = kind.model_fields[name]
        return field.kw_only is not False, GROUPS.index(group_of(kind, name)), not field.is_required()

    return sorted(kind.model_fields, key=place)


def group_of(kind: type[Options], name: str) -> str:
    title: str = shell_of(kind.model_fields[name]).group or defining_class(kind, name).group
    return title


def _describe_options(kind: type[Options]) -> list[str]:
    lines = []
    for name in ordered_options(kind):
        text = f"{name}: {kind.model_fields[name].description}"
        lines += wrap(text, 116, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)
    return lines
