"""The demo's text: the running Python's own standard library, split by a hash of the module path.

Every machine that can run this package has it, so nothing has to be shipped or downloaded. A module belongs to the
same side on every machine and in every Python version, so the modules the model is measured on are modules that its
training (`tools/train_demo_model.py`, Python 3.11) never saw; their text differs slightly between Python versions,
and a perplexity on it with them.
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
"""One module in this many is held out."""


def is_held_out(module: str) -> bool:
    """Whether a module, named by its posix path relative to the standard library, is kept out of training."""
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def modules(root: Path | None = None) -> list[Path]:
    """The standard library's modules in path order, without tests, generated tables and installed packages.

    Args:
        root: the library's folder; the running interpreter's own by default.

    Raises:
        FileNotFoundError: the folder holds no `.py` file (a Python that ships without its sources).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        # Installed packages are not even looked through: they may be tens of thousands of files.
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        found += (
            Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )
    found.sort(key=lambda path: path.relative_to(root).as_posix())
    if not found:
        raise FileNotFoundError(f"{root} holds no Python source: the demo reads the standard library's own text")
    return found


def text(*, held_out: bool, root: Path | None = None) -> str:
    """The text of one side of the split, modules in path order, joined by a newline."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    chosen = (p for p in modules(root) if is_held_out(p.relative_to(root).as_posix()) == held_out)
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in chosen)
