"""Where a page may be written."""

import os
from pathlib import Path

from ckpt_prune.checkpoint.files import check_place
from ckpt_prune.common.errors import UserError

MARKER = '<meta name="generator" content="ckpt-prune report">'
"""By which a page of this tool is known."""


def check_page(out: Path, overwrite: bool) -> None:
    """Refuse a place for a page; `overwrite` replaces a page of this tool and nothing else.

    Raises:
        UserError: its folder is not there, or there is something already.
    """
    check_place(out)
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise UserError(f"{out} exists: choose another name or say --overwrite")
    if not out.is_file() or MARKER.encode() not in out.read_bytes():
        raise UserError(f"{out} exists and is not a report: it is not overwritten")
