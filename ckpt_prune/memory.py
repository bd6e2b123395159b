"""Resident memory of this process, without a dependency."""

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak() -> int | None:
    """Largest resident size so far in bytes; None where the system does not say."""
    return _linux("VmHWM") or _maximum()


def resident() -> int | None:
    """Resident size now in bytes; the largest so far where the system says no more."""
    return _linux("VmRSS") or _maximum()


def _linux(key: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
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
