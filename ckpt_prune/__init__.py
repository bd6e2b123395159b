"""Smaller transformers today: structured pruning of Hugging Face checkpoints with closed-form compensation.

What the commands of `ckpt-prune` do, a function of the same name does here, with the same options and the same errors
(`UserError`); results are objects, and `progress=False` keeps stderr silent.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_prune._version import __version__
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.errors import to_user_error as _named

# Else onnxruntime (1.31 on Linux, too) keeps an identifier in ~/.cache and reports over the network to its maker.
# Read when it is first loaded, here or in a process that this one starts; a user's own setting stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from ckpt_prune.api.benchmark import benchmark
    from ckpt_prune.api.calibrate import calibrate
    from ckpt_prune.api.compare import compare
    from ckpt_prune.api.convert import convert
    from ckpt_prune.api.evaluate import evaluate
    from ckpt_prune.api.export import export
    from ckpt_prune.api.inspect import inspect
    from ckpt_prune.api.load import load
    from ckpt_prune.api.plan import plan
    from ckpt_prune.api.prune import prune
    from ckpt_prune.api.push import push
    from ckpt_prune.api.quantize import quantize
    from ckpt_prune.api.recover import recover
    from ckpt_prune.api.sweep import sweep
    from ckpt_prune.api.validate import validate
    from ckpt_prune.api.verify import verify

__all__ = [
    "UserError",
    "__version__",
    "benchmark",
    "calibrate",
    "compare",
    "convert",
    "evaluate",
    "export",
    "inspect",
    "load",
    "plan",
    "prune",
    "push",
    "quantize",
    "recover",
    "sweep",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a function when it is first asked for: some bring torch and transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "ckpt_prune.api.load" if name == "load" else f"ckpt_prune.api.{name}"
    return _with_user_errors(getattr(importlib.import_module(module), name))


@functools.cache
def _with_user_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose errors of the system are `UserError`, as the command line has them in a line."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except OSError as error:
            raise _named(error) from error

    return called


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
