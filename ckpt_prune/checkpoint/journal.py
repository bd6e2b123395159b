"""The journal of an unfinished run: which parts of its output are safely on disk, so that a killed run can resume."""

import json
import threading
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
_VERSION = 3
_RECORDING = threading.Lock()


@dataclass
class Journal:
    """Progress of a run, kept in a file of its staging folder.

    Attributes:
        job: digest of everything that the output depends on.
        replace: whether the run may replace an existing output.
        resumable: whether another run can continue it.
        layout: digest of the output's files, tensors and shapes; None until they are known.
        complete: whether only the swap of folders is left to do.
        entries: finished entries, each with the names of its tensors.
        notes: JSON that was noted with an entry.
    """

    folder: Path
    job: str
    replace: bool = False
    resumable: bool = True
    layout: str | None = None
    complete: bool = False
    entries: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Journal":
        """Read the journal of a folder. Raises ValueError if it is damaged or of another version."""
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
                dict(values["entries"]),
                dict(values["notes"]),
            )
        except (OSError, KeyError, TypeError) as error:
            raise ValueError(str(error)) from error

    def record(self, entry: str, names: Iterable[str] = (), note: Any = None) -> None:
        """Record a finished entry and a JSON note. Its bytes must be on disk already. Several threads may record."""
        with _RECORDING:
            self.entries[entry] = sorted(names)
            if note is not None:
                self.notes[entry] = note
            self.save()

    def save(self) -> None:
        """Write the journal atomically."""
        values = {"version": _VERSION, **vars(self)}
        del values["folder"]
        fresh = self.folder / _FRESH
        # On one line: it is written anew for every block, and indenting takes Python longer than all the rest.
        fresh.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
        sync(fresh)
        fresh.replace(self.folder / JOURNAL)
        sync(self.folder)


def is_unfinished_run(folder: Path) -> bool:
    """Whether a run of this tool left a folder: it has a journal, or was killed before writing its first."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    return (folder / JOURNAL).is_file() or all(path.name == _FRESH for path in folder.iterdir())


def refuse_unfinished(folder: Path) -> None:
    """Refuse to treat the staging folder of an unfinished run as an output."""
    # A kill may leave the journal for a moment in a finished output: the name tells.
    if not (folder.absolute().name.endswith(".partial") and (folder / JOURNAL).is_file()):
        return
    try:
        resumable = Journal.read(folder).resumable
    except ValueError:
        resumable = False
    goes_on = "goes on with --resume, or " if resumable else ""
    raise UserError(f"{folder} is an unfinished run: the command that began it {goes_on}starts afresh with --overwrite")
