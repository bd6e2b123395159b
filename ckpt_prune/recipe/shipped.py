"""The shipped recipes, and files of recipes. Without torch, so that a wrong name is refused at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import RECIPE
from ckpt_prune.common.similar_names import did_you_mean
from ckpt_prune.common.yaml12 import read_yaml
from ckpt_prune.recipe.origin import Origin

if TYPE_CHECKING:
    from ckpt_prune.recipe.recipe import Recipe

DEFAULT_RECIPE = "best-uniform"
"""The recipe of users who name none: a newcomer's first output loads without remote code."""
ONE_WIDTH_RECIPE = "ridge"
"""The recipe that takes its place where one config key states the width of several stacks of blocks."""
WIDER_CHOICE = "best"
"""The shipped recipe that is the default one with widths per block."""
MOST_BYTES = 2**18
"""A recipe has at most so many bytes; the shipped ones have a few thousand."""


@dataclass(frozen=True)
class RecipeFile:
    """A recipe's file on this machine.

    Attributes:
        origin: where it was fetched from; None if it was here.
        name: of a shipped recipe; else of the file.
        changes: top-level keys of a shipped recipe that stand in place of those of the file.
        is_first: whether it is in the first list of `recipe list`, not among those of papers.
    """

    path: Path
    origin: Origin | None = None
    name: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    is_first: bool = False


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes: inside the installed package, or at the root of a source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


@cache
def shipped_recipes() -> Mapping[str, RecipeFile]:
    """Return name → file of every shipped recipe, sorted by name.

    `recipes/names.yaml` lists those that are another one with some keys changed.
    """
    folder = recipes_folder()
    recipes = {path.stem: RecipeFile(path, name=path.stem, is_first=True) for path in folder.glob("*.yaml")}
    del recipes["names"]
    recipes |= {path.stem: RecipeFile(path, name=path.stem) for path in (folder / "papers").glob("*.yaml")}
    _, names = read_yaml((folder / "names.yaml").read_text(encoding="utf-8"))
    for name, keys in names.items():
        changes = {key: value for key, value in keys.items() if key != "of"}
        recipes[name] = RecipeFile(recipes[keys["of"]].path, name=name, changes={"name": name, **changes})
    return dict(sorted(recipes.items()))


def find_recipe(reference: str) -> RecipeFile:
    """Return the file of a shipped recipe's name, or of a path to a file, to an output or to a folder with one recipe.

    A name that is none is refused with the nearest shipped names.
    """
    shipped = shipped_recipes()
    if reference in shipped:
        return shipped[reference]
    path = Path(reference)
    if path.is_file():
        return RecipeFile(path, name=path.stem)
    if reference and path.is_dir():  # Path("") would be the current folder
        return _only_recipe(path)
    if path.parent.is_dir() and path.parent != Path() and (path.parent / f"{path.name}.yaml").is_file():
        return RecipeFile(path.parent / f"{path.name}.yaml", name=path.name)
    name, mark, pin = reference.partition("@")
    if mark and (name in shipped or Path(name).is_file()):
        raise UserError(
            f"{reference}: only recipes of the Hub are pinned, ORG/REPO/NAME.yaml@COMMIT; {name} comes "
            f"{'with ckpt-prune' if name in shipped else 'from this machine'}: leave @{pin} off"
        )
    if "://" in reference:
        raise UserError(
            f"{reference.partition('?')[0]}: recipes are not fetched from the web: download the file and give its "
            "path, or take one of the Hub, ORG/REPO/NAME.yaml@COMMIT"
        )
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise UserError(f"{reference}: no such recipe file")
    hint = did_you_mean(reference, shipped, most=3)
    raise UserError(
        f"no recipe {reference!r}: {hint}`ckpt-prune recipe list --all` shows all; or give a path to a .yaml file"
    )


def _only_recipe(folder: Path) -> RecipeFile:
    if (folder / RECIPE).is_file():
        return RecipeFile(folder / RECIPE, name=folder.name)
    recipes = sorted(path for path in folder.iterdir() if path.suffix in {".yaml", ".yml"} and path.is_file())
    if not recipes:
        raise UserError(f"{folder} is a folder without a recipe; give a .yaml file")
    if len(recipes) > 1:
        names = ", ".join([*(str(folder / path.stem) for path in recipes[:3]), *["…"][: len(recipes) > 3]])
        raise UserError(f"{folder} has {len(recipes)} recipes; give one of them: {names}")
    return RecipeFile(recipes[0], name=recipes[0].stem)


def recipe_text(file: RecipeFile) -> str:
    """Return the content of a recipe file, comments included; with `changes`, it is written anew."""
    try:
        text = read_input(file.path, MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} cannot be read as text: a recipe is a YAML file") from error
    if not file.changes:
        return text
    _, stated = read_yaml(text)
    values = {key: value for key, value in (stated | file.changes).items() if value is not None}
    header = f"# Recipe {file.path.stem} with other keys.\n"
    return header + yaml.safe_dump(values, sort_keys=False, width=120)


def text_of_recipe(recipe: "Recipe") -> str:
    """Return a file of a recipe with every default spelt out; keys without a value are left out."""
    values = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    return "# The recipe as it was run.\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
