"""Statistics folders that are named: told without torch, which takes seconds to load, whether they are there."""

from pathlib import Path

from ckpt_prune.checkpoint.written import Kind
from ckpt_prune.errors import UserError

INDEX = "statistics.json"
STATISTICS = Kind(INDEX, "a statistics folder", left="dropped")
"""What `calibrate` writes."""


def check_statistics(folder: Path) -> None:
    """Refuse a folder that holds no statistics.

    Raises:
        UserError: it has no index.
    """
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds no {INDEX}: statistics are written by `ckpt-prune calibrate`")
