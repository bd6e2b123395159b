"""Where an output goes."""

import os
from pathlib import Path

from ckpt_prune.common.errors import UserError


def absolute(path: Path) -> Path:
    """The absolute path, links in it left as they are: one at an output's place must not be replaced by its target."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link


def place_of(out: Path) -> Path:
    """The absolute path of an output.

    Raises:
        UserError: the folder it goes in does not exist.
    """
    place = absolute(out)
    if not place.parent.is_dir():
        raise UserError(f"the folder {place.parent} does not exist; create it first")
    return place
