"""Starting another process, which ends with this one.

A Python imports what this one imports, and nothing of the folder that the user stands in.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_END_WITH = (
    "import sys; sys.path[:] = {path}; from ckpt_prune.common.child_process import end_with; end_with({parent}); "
)
_MODULE = "import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program in a new Python, which ends with this process.

    Start it in a folder of its own, with `safe_environment`: Python, Node and the libraries that they load would run
    files such as `numpy.py` of the working folder.
    """
    begin = _END_WITH.format(path=import_path(), parent=os.getpid())
    return [sys.executable, "-P", "-c", begin + _MODULE.format(module=module), *arguments]


def end_with(parent: int) -> None:
    """End this process as soon as its parent has ended, also if that was killed.

    On Linux that holds for a program in its place, too.

    Args:
        parent: id of the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    elif os.name == "posix":
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.name == "posix" and os.getppid() != parent:  # it ended before
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


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
