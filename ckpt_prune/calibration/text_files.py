"""Text files before they are read; without torch, so that a wrong name is refused at once."""

from collections.abc import Iterable
from pathlib import Path

from ckpt_prune.errors import UserError


def check_texts(files: Iterable[Path]) -> None:
    """Refuse text files that are not there.

    Raises:
        UserError: with the first of them.
    """
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: no such text file")
