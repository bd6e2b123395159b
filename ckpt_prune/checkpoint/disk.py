"""Waiting for the disk."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
