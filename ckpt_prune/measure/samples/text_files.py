"""Check text files before they are read. Does not import torch, so that a wrong name is refused at once."""

from collections.abc import Iterable
from pathlib import Path

from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets.texts import parse_text_name


def check_texts(files: Iterable[Path]) -> None:
    """Refuse text files that do not exist; find or download texts that are given by name (`text_names`)."""
    for file in files:
        named = parse_text_name(file)
        if named is not None:
            named.file()
        elif not file.is_file():
            problem = "a folder, not a" if file.is_dir() else "no such"
            raise UserError(f"{file}: {problem} text file")
