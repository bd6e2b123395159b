"""Places of recipes: a shipped name, a file, a folder, or a Hub repository.

Downloads are data of a bounded size, and their digest is recorded.
"""

import hashlib
import re
from pathlib import Path

from ckpt_prune.checkpoint.hub_files import commit_of, fetch_hub_file
from ckpt_prune.recipe.origin import Origin
from ckpt_prune.recipe.shipped import MOST_BYTES, RecipeFile, find_recipe

_ON_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<name>[\w./ -]+\.ya?ml)(?:@(?P<revision>[^@\s]+))?")


def check_recipe(reference: str) -> None:
    """Refuse what cannot be a recipe, without any network."""
    if _on_hub(reference) is None:
        find_recipe(reference)


def locate_recipe(reference: str) -> RecipeFile:
    """Return the file of a recipe, downloaded if it is elsewhere.

    Args:
        reference: a shipped recipe's name, a path to a file or to a folder of recipes, or `org/repo/name.yaml` on the
            Hub, perhaps with `@revision`.
    """
    hub_file = _on_hub(reference)
    if hub_file is None:
        return find_recipe(reference)
    path = fetch_hub_file(hub_file["repo"], hub_file["name"], hub_file["revision"], most=MOST_BYTES)
    commit = commit_of(path, hub_file["name"])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    origin = Origin(reference=f"{hub_file['repo']}/{hub_file['name']}", revision=commit, sha256=digest)
    return RecipeFile(path, origin, Path(hub_file["name"]).stem)


def _on_hub(reference: str) -> re.Match[str] | None:
    """Return repository, file and revision if a reference is to the Hub; a path whose first folder is here is none."""
    file = _ON_HUB.fullmatch(reference)
    if file is None or reference.startswith(".") or ".." in reference.split("/"):
        return None
    return None if Path(reference).exists() or Path(reference.partition("/")[0]).is_dir() else file
