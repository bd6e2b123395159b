"""Places of recipes: a shipped name, a file, a folder, a Hub repository, or an address on the web.

What is downloaded is data of a bounded size, and its digest is recorded.
"""

import hashlib
import re
from pathlib import Path

from ckpt_prune.checkpoint.hub_files import commit_of, fetch_hub_file
from ckpt_prune.checkpoint.web_file import fetch_web_file, hide_query
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.records import Origin
from ckpt_prune.recipe.shipped import MOST_BYTES, RecipeFile, find_recipe

_ON_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<name>[\w./ -]+\.ya?ml)(?:@(?P<revision>[^@\s]+))?")
_PINNED = re.compile(r"sha256=(?P<digest>[0-9a-f]{64})")
_VIEWED = re.compile(r"^(https://[^/]+/[^?#]+?)/blob/")


def check_recipe(reference: str) -> None:
    """Refuse what cannot be a recipe, without any network."""
    if _url(reference) is None and _on_hub(reference) is None:
        find_recipe(reference)


def locate_recipe(reference: str) -> RecipeFile:
    """Return the file of a recipe, downloaded if it is elsewhere.

    Args:
        reference: a shipped recipe's name, a path to a file or to a folder of recipes, `org/repo/name.yaml` on the Hub,
            perhaps with `@revision`, or an https address, perhaps with `#sha256=DIGEST`.
    """
    url = _url(reference)
    if url is not None:
        address, _, pin = url.partition("#")
        pinned = _PINNED.fullmatch(pin)
        if pin and pinned is None:
            raise UserError(f"{hide_query(address)}#{pin}: behind # stands sha256= and 64 digits of 0-9a-f")
        path = fetch_web_file(address, most=MOST_BYTES, sha256=pinned["digest"] if pinned else None)
        return RecipeFile(path, Origin(reference=hide_query(address), revision=None, sha256=_sha256(path)), path.stem)
    hub_file = _on_hub(reference)
    if hub_file is None:
        return find_recipe(reference)
    path = fetch_hub_file(hub_file["repo"], hub_file["name"], hub_file["revision"], most=MOST_BYTES)
    commit = commit_of(path, hub_file["name"])
    origin = Origin(reference=f"{hub_file['repo']}/{hub_file['name']}", revision=commit, sha256=_sha256(path))
    return RecipeFile(path, origin, Path(hub_file["name"]).stem)


def _url(reference: str) -> str | None:
    """Return an address; that of the raw file for a page that shows one. None for other references."""
    return _VIEWED.sub(r"\1/raw/", reference) if "://" in reference else None


def _on_hub(reference: str) -> re.Match[str] | None:
    """Return repository, file and revision if a reference is to the Hub; a path whose first folder is here is none."""
    file = _ON_HUB.fullmatch(reference)
    if file is None or reference.startswith(".") or ".." in reference.split("/"):
        return None
    return None if Path(reference).exists() or Path(reference.partition("/")[0]).is_dir() else file


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
