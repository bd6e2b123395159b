"""Statistics folders that are named: told without torch, which takes seconds to load, whether they are there."""

from pathlib import Path

from ckpt_prune.checkpoint.folder_kinds import FolderKind
from ckpt_prune.common.errors import UserError

INDEX = "statistics.json"
STATISTICS = FolderKind(INDEX, "a statistics folder", unfinished="dropped")
"""What `calibrate` writes."""


def check_statistics(folder: Path) -> None:
    """Refuse a folder that holds no statistics.

    Raises:
        UserError: it has no index.
    """
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds no {INDEX}: statistics are written by `ckpt-prune calibrate`")
