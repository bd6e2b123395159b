"""Make what takes long once for all workers of a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of a run share, and no other run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(place: Path, make: Callable[[Path], Path]) -> Path:
    """Return what `make` made in the new folder `place`. One process makes it; the others wait.

    Args:
        place: a folder below `run_folder`.
        make: writes below `place` and returns where. After a failure the next process that asks makes it again.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    record = place.with_name(place.name + ".made")
    with FileLock(place.with_name(place.name + ".lock")):
        if not record.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            record.write_text(str(make(place)))
    return Path(record.read_text())
