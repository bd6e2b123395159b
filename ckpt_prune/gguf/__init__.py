"""GGUF files: written, proven in llama.cpp, and read."""

import os
from importlib.util import find_spec
from pathlib import Path

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install


def require_gguf() -> None:
    """Refuse if the package gguf is not installed."""
    if find_spec("gguf") is None:
        raise UserError(f"the package gguf is not installed: {install('gguf')}")


def check_gguf_place(out: Path, *, overwrite: bool) -> None:
    """Refuse an output that is no new file, unless it replaces a GGUF file."""
    if out.suffix != ".gguf":
        raise UserError(f"{out}: a GGUF file has a name that ends in .gguf")
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_file():
        raise UserError(f"{out} is no file: choose another name")
    if not overwrite:
        raise UserError(f"{out} exists; --overwrite replaces it, or choose another name")
    with out.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{out} is no GGUF file, and is not replaced: choose another name")
