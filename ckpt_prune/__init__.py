"""Smaller transformers today: structured pruning of Hugging Face checkpoints with closed-form compensation.

Each command of `ckpt-prune` is a function here, with the same name, options and errors (`UserError`). `help` shows
every option. Results are objects, and `progress=False` keeps stderr silent.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from ckpt_prune._version import __version__
from ckpt_prune.common.errors import UserError

# Otherwise onnxruntime (1.31, on Linux, too) keeps an identifier in ~/.cache and reports to its maker over the network.
# It reads this when it is first loaded, here or in a process that this one starts. A user's own setting stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# On Linux torch then asks for large pages for tensors of 2 MiB and more. Otherwise the kernel hands out memory in pages
# of 4 KiB, and to copy a large matrix takes three times as long. torch reads this when it first takes memory.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:
    from ckpt_prune.api.commands import (
        benchmark,
        calibrate,
        compare,
        convert,
        evaluate,
        export,
        frontier,
        inspect,
        plan,
        prune,
        push,
        quantize,
        recover,
        sweep,
        verify,
    )
    from ckpt_prune.api.load import load
    from ckpt_prune.api.validate import validate

__all__ = [
    "UserError",
    "__version__",
    "benchmark",
    "calibrate",
    "compare",
    "convert",
    "evaluate",
    "export",
    "frontier",
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
    module = name if name in ("load", "validate") else "commands"
    return getattr(importlib.import_module(f"ckpt_prune.api.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
