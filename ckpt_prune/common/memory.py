"""Resident memory of this process, without a dependency."""

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def peak() -> int | None:
    """Largest resident size so far in bytes; None where the system does not say."""
    return _linux("VmHWM") or _maximum()


def resident_bytes() -> int | None:
    """Resident size now in bytes; the largest so far where the system says no more."""
    return _linux("VmRSS") or _maximum()


def available() -> int | None:
    """Bytes that this process may still take without others having to give way; None where the system does not say.

    A container's own limit counts (control groups, version 2).
    """
    free = _linux("MemAvailable", _SYSTEM)
    try:
        most, taken = (int((_GROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return free
    left = max(0, most - taken)
    return left if free is None else min(left, free)


def _linux(key: str, file: Path | None = None) -> int | None:
    try:
        lines = (file or _STATUS).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _maximum() -> int | None:
    """By getrusage, which on Linux also counts what the parent had when it started this process."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
