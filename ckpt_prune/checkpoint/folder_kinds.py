"""What of a folder this tool wrote, told by the record in it: nothing else is ever replaced."""

import filecmp
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import EXPORT_ERROR, GRAPH_FOLDER, GRAPH_RECORD, REPORT, VALIDATION

WantedNames = Mapping[str, Path | None]
"""Names at the top of a new folder → the file that is copied there; None where it is made."""


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that this tool writes, known by its record: JSON with `files`, and perhaps `side_files`.

    Attributes:
        record: the record's name.
        what: such a folder is, in messages.
        always: names beside the record that are this tool's whether the record lists them or not.
        inside: of the record, which sub-folders this tool wrote with the folder, and of what kind they are.
        left: what becomes of an unfinished run: another can go on with it, --overwrite drops it, or any run drops it.
    """

    record: str
    what: str
    always: frozenset[str] = frozenset()
    inside: Callable[[dict[str, Any]], Mapping[str, "Kind"]] = field(default=lambda _record: {})
    left: Literal["resumed", "asked", "dropped"] = "resumed"

    def written(self, folder: Path) -> frozenset[str]:
        """Paths below a folder, with slashes, of what this tool wrote in it.

        Raises:
            UserError: this tool did not write the folder; with what is missing.
        """
        if folder.is_symlink():
            raise self._refusal(folder, "it is a link")
        if not folder.is_dir():
            raise self._refusal(folder, "it is no folder")
        if not (folder / self.record).is_file():
            raise self._refusal(folder, f"it has no {self.record}")
        try:
            record = parse_json_object(read_input(folder / self.record))
            found = set(self.names(record))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._refusal(folder, f"its {self.record} is damaged") from error
        for name, kind in self.inside(record).items():
            if (folder / name / kind.record).is_file():
                found |= {f"{name}/{inner}" for inner in kind.written(folder / name)}
        return frozenset(found)

    def names(self, record: dict[str, Any]) -> frozenset[str]:
        """Paths of what this tool wrote in a folder with such a record, folders inside it left out.

        Raises:
            KeyError, TypeError, ValueError: it is no such record.
        """
        names = {str(name) for name in [*dict(record["files"]), *(record.get("side_files") or [])]}
        return frozenset({name for name in names if _is_below(name)} | self.always | {self.record})

    def _refusal(self, folder: Path, reason: str) -> UserError:
        return UserError(
            f"{folder} exists and is not {self.what} ({reason}), so it is never replaced; choose another name"
        )


def _is_below(name: str) -> bool:
    """Whether a name of a record is that of a file in the folder, or in one inside it."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part not in ("", ".", "..") for part in parts)


EXPORT_KIND = FolderKind(GRAPH_RECORD, "an exported folder", frozenset({"README.md", VALIDATION}), unfinished="asked")
"""What `export` writes."""


def _graph(record: dict[str, Any]) -> Mapping[str, FolderKind]:
    """The graph that the last step of a recipe wrote. One that was exported later is its user's own."""
    recipe = record.get("recipe")
    return {GRAPH_FOLDER: EXPORT_KIND} if isinstance(recipe, dict) and recipe.get("export") else {}


OUTPUT_KIND = FolderKind(
    REPORT,
    "an output of this tool",
    # As older reports do not list: what follows from there being an output at all.
    frozenset({"README.md", "model.safetensors.index.json", "modeling_pruned.py", f"{GRAPH_FOLDER}{EXPORT_ERROR}"}),
    _graph,
)
"""What `prune` and `recover` write."""
WEIGHT_NAMES: dict[str, Path | None] = {"model.safetensors": None, "model.safetensors.index.json": None}
"""Loaders take these for the weights of whatever folder they stand in."""


def find_foreign(folder: Path, written: Set[str]) -> list[str]:
    """Topmost paths below a folder that this tool did not write: files, links, and folders without anything of it.

    Args:
        folder: an old output.
        written: as `Kind.written` has it.
    """
    found: list[str] = []

    def look(path: Path, name: str) -> None:
        if path.is_dir() and not path.is_symlink():
            if (path / JOURNAL).is_file():
                return  # what an interrupted run of this tool left
            if any(each.startswith(f"{name}/") for each in written):
                for inner in sorted(path.iterdir()):
                    look(inner, f"{name}/{inner.name}")
                return
        elif name in written or name == JOURNAL:
            return
        found.append(name)

    for path in sorted(folder.iterdir()):
        look(path, path.name)
    return found


def refuse_lost(folder: Path, theirs: list[str], wants: WantedNames) -> None:
    """Refuse to replace a folder where a file of somebody else has a name that the new one needs.

    Args:
        folder: that is to be replaced.
        theirs: its `strangers`.
        wants: names of the new folder. A file that is the same as the one to be copied there is not lost.

    Raises:
        UserError: naming the first that is in the way.
    """
    for name in theirs:
        top = name.split("/")[0]
        if top in wants and not (name == top and same_file(folder / name, wants[name])):
            raise UserError(
                f"{folder / name} was not written with the output that is there, and the new one needs its name; "
                "move it away or choose another output name"
            )


def same_file(a: Path, b: Path | None) -> bool:
    """Whether two files hold the same bytes."""
    return b is not None and a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)
