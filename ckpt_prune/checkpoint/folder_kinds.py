"""Kinds of folders that this tool writes, and which files in one are its own. Other files are never replaced."""

import filecmp
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import (
    CONVERSION_RECORD,
    EXPORT_ERROR,
    FRONTIER_RECORD,
    GRAPH_FOLDER,
    GRAPH_RECORD,
    REPORT,
    VALIDATION,
    partial_name,
)
from ckpt_prune.common.graph_types import GGUF_FILES

WantedNames = Mapping[str, Path | None]
"""Names at the top of a new folder → the file that is copied there, or None if it is made."""


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that this tool writes, recognised by its record: JSON with `files`, and perhaps `side_files`.

    Attributes:
        record: name of the record.
        what: such a folder is, for messages.
        always: names of files that are this tool's even if the record does not list them.
        exported: returns for a record the names of files that were exported into the folder, if they are there.
        inside: returns for a record the sub-folders that were written with the folder, and their kinds.
        unfinished: what happens to an unfinished run: a later one resumes it, deletes it when asked to (--overwrite),
            or always deletes it.
    """

    record: str
    what: str
    always: frozenset[str] = frozenset()
    exported: Callable[[dict[str, Any]], Set[str]] = field(default=lambda _record: frozenset())
    inside: Callable[[dict[str, Any]], Mapping[str, "FolderKind"]] = field(default=lambda _record: {})
    unfinished: Literal["resumed", "asked", "dropped"] = "resumed"

    def list_written(self, folder: Path) -> frozenset[str]:
        """Return the paths below a folder, with slashes, of the files that this tool wrote; refuse another's folder."""
        if folder.is_symlink():
            raise self._refusal(folder, "it is a link")
        if not folder.is_dir():
            raise self._refusal(folder, "it is no folder")
        if not (folder / self.record).is_file():
            raise self._refusal(folder, f"it has no {self.record}")
        try:
            record = parse_json_object(read_input(folder / self.record))
            names = set(self.names(record))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._refusal(folder, f"its {self.record} is damaged") from error
        for inner, kind in self.inside(record).items():
            if (folder / inner / kind.record).is_file():
                names |= {f"{inner}/{name}" for name in kind.list_written(folder / inner)}
        return frozenset(names)

    def names(self, record: dict[str, Any]) -> frozenset[str]:
        """Return the paths of the files of a folder with such a record, without those of sub-folders of other kinds.

        Raises:
            KeyError, TypeError, ValueError: it is no such record.
        """
        files = record["files"]
        if not isinstance(files, dict | list):  # names, with digests or without
            raise TypeError(f"{files!r} are no files")
        names = {str(name) for name in [*files, *(record.get("side_files") or [])]}
        # A record cannot name a file outside the folder.
        listed = {name for name in names if all(part not in ("", ".", "..") for part in name.split("/"))}
        return frozenset(listed | self.always | self.exported(record) | {self.record})

    def _refusal(self, folder: Path, reason: str) -> UserError:
        return UserError(
            f"{folder} exists and is not {self.what} ({reason}), so it is never replaced; choose another name"
        )


EXPORT_KIND = FolderKind(GRAPH_RECORD, "an exported folder", frozenset({"README.md", VALIDATION}), unfinished="asked")
"""Written by `export`."""
CONVERSION_KIND = FolderKind(CONVERSION_RECORD, "what `convert` wrote")
FRONTIER = FolderKind(FRONTIER_RECORD, "a folder that `ckpt-prune frontier` writes")


def _exported_files(record: dict[str, Any]) -> Set[str]:
    recipe = record.get("recipe")
    export = recipe.get("export") if isinstance(recipe, dict) else None
    if not isinstance(export, dict) or export.get("format") != "gguf":
        return frozenset()
    return {*GGUF_FILES.values(), *(partial_name(name) for name in GGUF_FILES.values())}


def _find_graph_folder(record: dict[str, Any]) -> Mapping[str, FolderKind]:
    # A graph that the recipe itself exported. One that was exported later is its user's own.
    recipe = record.get("recipe")
    return {GRAPH_FOLDER: EXPORT_KIND} if isinstance(recipe, dict) and recipe.get("export") else {}


OUTPUT_KIND = FolderKind(
    REPORT,
    "an output of this tool",
    # Older reports do not list these, which come with every output.
    frozenset(
        {
            "README.md",
            "model.safetensors.index.json",
            "modeling_pruned.py",
            "mlx_pruned.py",
            f"{GRAPH_FOLDER}{EXPORT_ERROR}",
        }
    ),
    _exported_files,
    _find_graph_folder,
)
"""Written by `prune` and `recover`."""
WEIGHT_NAMES: dict[str, Path | None] = {"model.safetensors": None, "model.safetensors.index.json": None}
"""Files that loaders take for the weights of the folder they are in."""


def find_foreign(folder: Path, written: Set[str]) -> list[str]:
    """List the topmost paths below an old output that this tool did not write: files, links, folders without its files.

    `written` comes from `FolderKind.list_written`.
    """
    foreign: list[str] = []

    def look(path: Path, name: str) -> None:
        if path.is_dir() and not path.is_symlink():
            if (path / JOURNAL).is_file():
                return  # left by an interrupted run of this tool
            if any(inner.startswith(f"{name}/") for inner in written):
                for inner_path in sorted(path.iterdir()):
                    look(inner_path, f"{name}/{inner_path.name}")
                return
        elif name in written or name == JOURNAL:
            return
        foreign.append(name)

    for path in sorted(folder.iterdir()):
        look(path, path.name)
    return foreign


def refuse_lost(folder: Path, foreign: list[str], wanted: WantedNames) -> None:
    """Refuse to replace a folder if the new one needs the name of a foreign file in it, unless both are the same."""
    for name in foreign:
        top = name.split("/")[0]
        if top in wanted and not (name == top and same_file(folder / name, wanted[name])):
            raise UserError(
                f"{folder / name} was not written with the output that is there, and the new one needs its name; "
                "move it away or choose another output name"
            )


def same_file(a: Path, b: Path | None) -> bool:
    """Return whether two files hold the same bytes."""
    return b is not None and a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)
