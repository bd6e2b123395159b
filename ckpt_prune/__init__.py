"""Smaller transformers today: structured pruning of Hugging Face checkpoints with closed-form compensation."""

from typing import Any

from ckpt_prune._version import __version__

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import `load` when it is first asked for: it brings torch and transformers."""
    if name == "load":
        from ckpt_prune.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
