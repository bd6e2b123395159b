"""Memory of this process and of the machine, without a dependency."""

import ctypes
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def peak_bytes() -> int | None:
    """Return the largest resident size so far; None if the system does not say."""
    return _read_linux("VmHWM") or _read_maximum()


def resident_bytes() -> int | None:
    """Return the resident size now, or the largest so far if the system says only that."""
    return _read_linux("VmRSS") or _read_maximum()


def available_bytes() -> int | None:
    """Return how much more this process may take without swapping; None if the system does not say.

    The limit of a container counts (control groups, version 2).
    """
    free = _read_linux("MemAvailable", _SYSTEM)
    try:
        limit, used = (int((_GROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return free
    allowed = max(0, limit - used)
    return allowed if free is None else min(allowed, free)


def return_freed_memory() -> None:
    """Give the system back what was freed, if the C library keeps it (glibc's does).

    It keeps pieces below its limit for maps, and the next user of memory, if it asks for other sizes, takes more.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _read_linux(key: str, file: Path | None = None) -> int | None:
    try:
        lines = (file or _STATUS).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _read_maximum() -> int | None:
    """Ask getrusage, which on Linux also counts what the parent had when it started this process."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
