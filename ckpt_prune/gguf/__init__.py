"""GGUF files: written, proven in llama.cpp, and read."""

from importlib.util import find_spec

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install


def require_gguf() -> None:
    """Refuse if the package gguf is not installed."""
    if find_spec("gguf") is None:
        raise UserError(f"the package gguf is not installed: {install('gguf')}")
