"""Check text files before they are read. Does not import torch, so that a wrong name is refused at once."""

from collections.abc import Iterable
from pathlib import Path

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.similar_names import similar_names, similar_siblings
from ckpt_prune.datasets.texts import TEXT_NAMES, parse_text_name


def check_texts(files: Iterable[Path]) -> None:
    """Refuse text files that do not exist; find or download texts that are given by name (`datasets.texts`)."""
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
    near = [str(sibling) for sibling in similar_siblings(missing, Path.is_file)]
    near += [f"the named text {name}" for name in similar_names(missing.name, TEXT_NAMES)]
    if near:
        return f": did you mean {' or '.join(near)}?"
    return "" if missing.suffix else f"; named texts are {', '.join(TEXT_NAMES)}"
