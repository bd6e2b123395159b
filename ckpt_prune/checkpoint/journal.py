"""The journal of an unfinished run: what of it is safely on disk, so that a killed run can go on where it stopped."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import read_input, sync
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError

# Hidden and unlike any published file: it is removed only after the swap, so that a kill there costs nothing.
JOURNAL = ".ckpt_prune_journal.json"
_FRESH = f"{JOURNAL}.tmp"
_VERSION = 2


@dataclass
class Journal:
    """What a run has done so far, in a file of its staging folder.

    Attributes:
        folder: the staging folder.
        job: digest of all that makes the output.
        replace: whether the run may replace an existing output.
        resumable: whether another run can go on with it.
        layout: digest of the output's files, tensors and shapes; None as long as they are not known.
        complete: whether nothing is left to do but to put the folder in its place.
        units: what is done, each with the names of the tensors that it holds.
        notes: what was noted with a unit.
    """

    folder: Path
    job: str
    replace: bool = False
    resumable: bool = True
    layout: str | None = None
    complete: bool = False
    units: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Journal":
        """The journal of a folder.

        Raises:
            ValueError: it is damaged or of another version.
        """
        try:
            values = parse_json_object(read_input(folder / JOURNAL))
            if values["version"] != _VERSION:
                raise ValueError(f"version {values['version']}")
            return cls(
                folder,
                values["job"],
                bool(values["replace"]),
                bool(values["resumable"]),
                values["layout"],
                bool(values["complete"]),
                dict(values["units"]),
                dict(values["notes"]),
            )
        except (OSError, KeyError, TypeError) as error:
            raise ValueError(str(error)) from error

    def record(self, unit: str, names: Iterable[str] = (), note: Any = None) -> None:
        """Enter `unit` as done, with a JSON note. The caller has its bytes on disk already."""
        self.units[unit] = sorted(names)
        if note is not None:
            self.notes[unit] = note
        self.save()

    def save(self) -> None:
        """Write the journal, whole or not at all."""
        values = {
            "version": _VERSION,
            "job": self.job,
            "layout": self.layout,
            "replace": self.replace,
            "resumable": self.resumable,
            "complete": self.complete,
            "units": self.units,
            "notes": self.notes,
        }
        fresh = self.folder / _FRESH
        # On one line: it is written anew at every block, and indenting takes Python longer than all the rest.
        fresh.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
        sync(fresh)
        fresh.replace(self.folder / JOURNAL)
        sync(self.folder)


def is_unfinished_run(folder: Path) -> bool:
    """Whether a run of this tool left a folder: one with a journal, or one that a kill kept from getting its first."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    return (folder / JOURNAL).is_file() or all(path.name == _FRESH for path in folder.iterdir())


def refuse_unfinished(folder: Path) -> None:
    """Refuse to look at the staging folder of an unfinished run as if it were an output.

    Raises:
        UserError: it is one; with what can be done.
    """
    # A kill may leave the journal for a moment in a finished output: the name tells.
    if not (folder.absolute().name.endswith(".partial") and (folder / JOURNAL).is_file()):
        return
    try:
        resumable = Journal.read(folder).resumable
    except ValueError:
        resumable = False
    goes_on = "goes on with --resume, or " if resumable else ""
    raise UserError(f"{folder} is an unfinished run: the command that began it {goes_on}starts afresh with --overwrite")
