"""Names that may have been meant where there is nothing of the name that was given."""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

NEAR = 0.75
"""Likeness of names that are suggested (`difflib`) where there are many: one letter more or less in four."""
_NEAR_ENOUGH = 0.6
"""Likeness where there are few names, so that the nearest one is probably meant."""


def similar_names(name: str, known: Iterable[str], most: int = 3, likeness: float = NEAR) -> list[str]:
    """Return the known names that are much like a name, in small or capital letters, the nearest first."""
    names = {each.lower(): each for each in known}
    return [names[each] for each in difflib.get_close_matches(name.lower(), names, most, likeness)]


def did_you_mean(given: str, known: Iterable[str], most: int = 1, likeness: float = _NEAR_ENOUGH) -> str:
    """Return `did you mean 'x'? ` with the known names that are nearest to what was given, or an empty string."""
    near = similar_names(given, known, most, likeness)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def similar_siblings(missing: Path, is_meant: Callable[[Path], bool]) -> list[Path]:
    """Return what lies beside a missing path under a similar name, or a longer one (wiki.train.txt for wiki.txt).

    Args:
        is_meant: tells what may be suggested from what may not, such as files from folders.
    """
    try:
        siblings = sorted(sibling.name for sibling in missing.parent.iterdir() if is_meant(sibling))
    except (OSError, ValueError):  # unreadable, no name of a file
        return []
    near = similar_names(missing.name, siblings)
    longer = [name for name in siblings if missing.name and name.startswith(missing.name)]
    longer += [name for name in siblings if name.startswith(f"{missing.stem}.") and name.endswith(missing.suffix)]
    return [missing.with_name(name) for name in near or longer[:3]]


def ask_for_sibling(missing: Path, is_meant: Callable[[Path], bool] = Path.is_file) -> str:
    """Return ` (did you mean x?)` with what `similar_siblings` finds, or an empty string."""
    near = similar_siblings(missing, is_meant)
    return f" (did you mean {' or '.join(map(str, near))}?)" if near else ""
