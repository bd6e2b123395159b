"""Starting another Python that imports what this one imports, and nothing of the folder that the user stands in."""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (
    "import sys; sys.path[:] = {path}; import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program in a new Python.

    Start it in a folder of its own, with `safe_environment`: Python, Node and the libraries that they load would run
    files such as `numpy.py` of the working folder.
    """
    return [sys.executable, "-P", "-c", _CODE.format(path=import_path(), module=module), *arguments]


def import_path() -> list[str]:
    """Return the folders that modules are imported from, without the working folder unless this package is in it."""
    here = Path.cwd()
    return [path for path in sys.path if Path(path).is_absolute() and (Path(path) != here or here == _ROOT)]


def safe_environment() -> dict[str, str]:
    """Return this process's environment for one in another folder: no Python that starts in it imports from there.

    Node looks for packages in the folders of NODE_PATH, which are made absolute.
    """
    packages = [str(Path(path).absolute()) for path in os.environ.get("NODE_PATH", "").split(os.pathsep) if path]
    return os.environ | {"PYTHONSAFEPATH": "1", "NODE_PATH": os.pathsep.join(packages)}
