"""Check text files before they are read. Does not import torch, so that a wrong name is refused at once."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets.texts import TEXT_NAMES, parse_text_name

_NEAR = 0.75
"""Names that are so much alike are suggested (1: the same)."""


def check_texts(files: Iterable[Path]) -> None:
    """Refuse text files that do not exist; find or download texts that are given by name (`text_names`)."""
    for file in files:
        named = parse_text_name(file)
        if named is not None:
            named.file()
        elif not file.is_file():
            if file.is_dir():
                raise UserError(f"{file}: a folder, not a text file")
            raise UserError(f"{file}: no such text file{_suggest_texts(file)}")


def _suggest_texts(missing: Path) -> str:
    """Ask whether a file beside it or a named text was meant; name those texts if the name has no suffix either."""
    try:
        siblings = sorted(sibling.name for sibling in missing.parent.iterdir() if sibling.is_file())
    except OSError:
        siblings = []
    near = [str(missing.with_name(name)) for name in difflib.get_close_matches(missing.name, siblings, cutoff=_NEAR)]
    near += [f"the named text {name}" for name in difflib.get_close_matches(missing.name, TEXT_NAMES, cutoff=_NEAR)]
    if near:
        return f": did you mean {' or '.join(near)}?"
    return "" if missing.suffix else f"; named texts are {', '.join(TEXT_NAMES)}"
