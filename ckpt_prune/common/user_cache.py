"""The folder in which results that cost much are kept for this user, on this machine."""

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    """Return the folder of one kind of results. It need not exist, and whoever deletes it loses nothing but time."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base) / "ckpt-prune" / kind
