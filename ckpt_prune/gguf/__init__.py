"""GGUF files: written, proven in llama.cpp, and read."""

import os
from importlib.util import find_spec
from pathlib import Path

from ckpt_prune.checkpoint.sentence_modules import MODULES
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install


def require_gguf(measured: str | None = None) -> None:
    """Refuse if the package gguf is not installed, and name all that files need beside it: in one command all come.

    Args:
        measured: folder of a model; if it is one of sentence-transformers, its embeddings are measured by these.
    """
    extras = dict.fromkeys(("gguf", "libgguf", "xllamacpp"), "llamacpp")
    if measured is not None and (Path(measured) / MODULES).is_file():
        extras["sentence_transformers"] = "embed"
    lacking = [module for module in extras if find_spec(module) is None]
    if {"gguf", "sentence_transformers"}.intersection(lacking):
        needed = ",".join(dict.fromkeys(extras[module] for module in lacking))
        raise UserError(f"not installed: {', '.join(lacking)}: {install(needed)}")


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
