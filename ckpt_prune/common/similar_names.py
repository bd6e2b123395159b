"""Names that may have been meant where there is nothing of the name that was given."""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

_NEAR = 0.75
"""Likeness of names that are suggested (`difflib`): one letter more or less in four."""


def similar_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are much like a name, the nearest first: three at most."""
    return difflib.get_close_matches(name, list(known), cutoff=_NEAR)


def similar_siblings(missing: Path, is_meant: Callable[[Path], bool]) -> list[Path]:
    """Return what lies beside a missing path under a similar name; nothing if its folder cannot be read.

    Args:
        is_meant: tells what may be suggested from what may not, such as files from folders.
    """
    try:
        siblings = sorted(sibling.name for sibling in missing.parent.iterdir() if is_meant(sibling))
    except (OSError, ValueError):  # unreadable, no name of a file
        return []
    return [missing.with_name(name) for name in similar_names(missing.name, siblings)]
