"""Replacing an old folder by a finished one, which keeps the files that this tool did not write.

At every moment OUT is absent, the old folder or the finished new one, and a file that somebody else put there is in OUT
or in `.OUT.ckpt_prune-replaced`. If a swap is killed, `complete` undoes or finishes it.
"""

import os
import shutil
from pathlib import Path

from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.folder_kinds import FolderKind, find_foreign, same_file
from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.common.errors import UserError


def swap(fresh: Path, out: Path, kind: FolderKind) -> list[str]:
    """Put a finished folder, which is on disk, in its place.

    Returns:
        Paths below OUT that this tool did not write and that were kept.
    """
    try:
        if out.exists():
            out.rename(_aside(out))
        fresh.rename(out)
    except (OSError, KeyboardInterrupt):
        if _aside(out).exists() and not out.exists():
            _aside(out).rename(out)
        raise
    return complete(out, kind)


def complete(out: Path, kind: FolderKind) -> list[str]:
    """Finish a swap, or undo one that was killed before the new folder was in place. Returns what `swap` does."""
    aside, doomed = _aside(out), out.with_name(f".{out.name}.ckpt_prune-deleted")
    if aside.exists() and not out.exists():
        aside.rename(out)
    if out.is_dir() and (aside.exists() or (out / JOURNAL).exists()):
        (out / JOURNAL).unlink(missing_ok=True)
        sync(out)
        sync(out.parent)
    kept: list[str] = []
    if aside.exists():
        kept = find_foreign(aside, kind.list_written(aside))
        _move(kept, aside, out)
        # From here on nothing in it is wanted: deleting may stop anywhere.
        if doomed.exists():
            shutil.rmtree(doomed)
        aside.rename(doomed)
    if doomed.exists():
        shutil.rmtree(doomed)
    return kept


def _move(names: list[str], old: Path, new: Path) -> None:
    for name in names:
        target = new / name
        if same_file(old / name, target):
            continue
        if os.path.lexists(target):
            raise UserError(f"{old / name} is to be kept, and {target} is there already; move one of them away")
        target.parent.mkdir(parents=True, exist_ok=True)
        (old / name).rename(target)
        sync(target.parent)


def _aside(out: Path) -> Path:
    return out.with_name(f".{out.name}.ckpt_prune-replaced")
