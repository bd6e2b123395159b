"""Recipes on their way to the Hub."""

import re
from pathlib import Path

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.hub.repository import PushedCommit, commit, find_repository
from ckpt_prune.recipe.shipped import MOST_BYTES, RecipeFile
from ckpt_prune.show.model_card import front_matter
from ckpt_prune.stages.recipe_files import load_recipe

_CARD = "README.md"
_NAME = re.compile(r"\w[\w.-]*")


def push_recipe(file: str, repo: str, *, public: bool, overwrite: bool) -> tuple[str, PushedCommit]:
    """Put a recipe into a repository, beside others that are there.

    The repository is made if it does not exist. Returns the value of --recipe for this very file, and the commit.
    """
    path = Path(file)
    if not path.is_file() or path.suffix not in {".yaml", ".yml"}:
        raise UserError(f"{file} is no .yaml file; `ckpt-prune recipe copy NAME FILE` makes one of a shipped recipe")
    if not _NAME.fullmatch(path.name):
        raise UserError(f"{file}: a file's name on the Hub has letters, digits, '.', '_' and '-' alone; rename it")
    content = read_input(path, MOST_BYTES)
    recipe = load_recipe(RecipeFile(path))
    place = find_repository(repo, public=public)
    if path.name in place.files and not overwrite:
        raise UserError(f"{place.repo} has a {path.name}: choose another name or say --overwrite")
    files: dict[str, Path | bytes] = {path.name: content}
    if _CARD not in place.files:
        files[_CARD] = _card(place.repo, path.name, recipe.summary).encode()
    pushed = commit(place, files, message=f"Recipe {recipe.name}")
    return f"{place.repo}/{path.name}@{pushed.oid}", pushed


def _card(repo: str, name: str, summary: str) -> str:
    """Return README.md for a new repository."""
    lines = [
        front_matter({"tags": ["ckpt-prune", "ckpt-prune-recipe"]}),
        f"# Recipes of {as_markdown(repo)}",
        "",
        "Recipes for ckpt_prune, which makes Hugging Face checkpoints smaller.",
        *([f"{as_code(name)}: {as_markdown(summary)}"] if summary else []),
        "",
        "```bash",
        f"ckpt-prune recipe show {repo}/{name}",
        f"ckpt-prune prune MODEL --recipe {repo}/{name} --text calib.txt -o OUT",
        "```",
        "",
    ]
    return "\n".join(lines)
