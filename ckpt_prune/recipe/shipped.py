"""The shipped recipes and finding a recipe's file, without torch: a wrong name is refused before anything is loaded."""

import difflib
from functools import cache
from pathlib import Path

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.common.errors import UserError

DEFAULT_RECIPE = "best-uniform"
"""The shipped recipe of those who name none: a newcomer's first output loads without remote code."""
WIDER_CHOICE = "best"
"""The shipped recipe that is the default one with widths per block."""
MOST_BYTES = 2**18
"""Of a recipe; the shipped ones have a few thousand."""


def recipes_folder() -> Path:
    """Where the shipped recipes are: inside the installed package, or at the root of a source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Name → file of every shipped recipe, sorted by name."""
    return dict(_shipped())


@cache
def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"), key=lambda path: path.stem)}


def find_recipe(reference: str) -> Path:
    """A shipped recipe's name, or a path to a file or to a folder with one, as a path.

    Raises:
        UserError: none of them, or a folder with several; the nearest shipped names are suggested, three at most.
    """
    shipped = shipped_recipes()
    if reference in shipped:
        return shipped[reference]
    path = Path(reference)
    if path.is_file():
        return path
    if reference and path.is_dir():  # Path("") would be the current folder
        return _only_recipe(path)
    if path.parent.is_dir() and path.parent != Path() and (path.parent / f"{path.name}.yaml").is_file():
        return path.parent / f"{path.name}.yaml"
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise UserError(f"{reference}: no such recipe file")
    near = " or ".join(repr(name) for name in difflib.get_close_matches(reference, shipped))
    hint = f"did you mean {near}? " if near else ""
    raise UserError(
        f"no recipe {reference!r}: {hint}`ckpt-prune recipe list` shows all; or give a path to a .yaml file"
    )


def _only_recipe(folder: Path) -> Path:
    """The recipe of a folder with one."""
    found = sorted(each for each in folder.iterdir() if each.suffix in {".yaml", ".yml"} and each.is_file())
    if not found:
        raise UserError(f"{folder} is a folder without a recipe; give a .yaml file")
    if len(found) > 1:
        named = ", ".join(str(folder / each.stem) for each in found[:3])
        raise UserError(
            f"{folder} has {len(found)} recipes; give one of them: {named}{', …' if len(found) > 3 else ''}"
        )
    return found[0]


def recipe_text(path: Path) -> str:
    """The content of a recipe file, comments included.

    Raises:
        UserError: it is not text.
    """
    try:
        return read_input(path, MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: a recipe is a YAML file") from error
