"""The standard library of the running Python as text, split by a hash of each module's path: the demo's, and proofs'.

Every machine that runs this package has it, so nothing must be shipped or downloaded. A module is on the same side on
every machine and in every version of Python. So the model is measured on modules that its training
(`tools/train_demo_model.py`, Python 3.11) never saw. Their text, and so the perplexity, differs slightly between
versions of Python.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

_EXCLUDED = frozenset(
    [
        *["test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"],
        *["site-packages", "dist-packages", "__pycache__", "__phello__"],
    ]
)
HELD_OUT_SHARE = 12
"""One module in this many is held out from training."""


def is_held_out(module: str) -> bool:
    """Return whether a module, named by its posix path in the standard library, is held out from training."""
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def list_modules(root: Path | None = None) -> list[Path]:
    """List the modules of the standard library in path order, without tests, generated tables and installed packages.

    Args:
        root: of the library; the running interpreter's by default.

    Raises:
        FileNotFoundError: there is no `.py` file (a Python that ships without its sources).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        # Installed packages are not even looked through: they may be tens of thousands of files.
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        paths += (
            Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise FileNotFoundError(f"{root} holds no Python source: the demo reads the standard library's own text")
    return paths


def read_corpus(*, held_out: bool, root: Path | None = None) -> str:
    """Return the text of one side of the split, modules in path order, joined by a newline."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    chosen = (p for p in list_modules(root) if is_held_out(p.relative_to(root).as_posix()) == held_out)
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in chosen)
