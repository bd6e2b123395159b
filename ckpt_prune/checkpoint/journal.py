"""The journal of an unfinished run: which parts of its output are safely on disk, so that a killed run can resume."""

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import read_input, sha256_files, sync
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError

# Hidden and unlike any published file: it is removed only after the swap, so that a kill there costs nothing.
JOURNAL = ".ckpt_prune_journal.json"
_FRESH = f"{JOURNAL}.tmp"
_VERSION = 5
WRITTEN = "everything but exports"
"""Entry of an output that lacks nothing but what is exported of it."""
_RECORDING = threading.Lock()


@dataclass
class Journal:
    """Progress of a run, kept in a file of its staging folder.

    Attributes:
        job: digest of everything that the output depends on.
        parts: name of each part of the job → what it is, or its digest, to say what differs.
        replace: whether the run may replace an existing output.
        resumable: whether another run can continue it.
        layout: digest of the output's files, tensors and shapes; None until they are known.
        complete: whether only the swap of folders is left to do.
        sources: what tells the tensors of the job's models from any others (`Checkpoint.identify`).
        entries: finished entries in their order, each with its tensors → hex SHA-256. A later one may rewrite them.
        files: entry → its files beside the output's, below the folder → hex SHA-256.
        notes: JSON that was noted with an entry.
    """

    folder: Path
    job: str
    replace: bool = False
    resumable: bool = True
    layout: str | None = None
    complete: bool = False
    sources: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, dict[str, str]] = field(default_factory=dict)
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
                list(values["sources"]),
                dict(values["parts"]),
                {entry: dict(digests) for entry, digests in values["entries"].items()},
                {entry: dict(digests) for entry, digests in values["files"].items()},
                dict(values["notes"]),
            )
        except (OSError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from error

    @property
    def is_written(self) -> bool:
        """Whether nothing but exports, which a complete output may have, is left to do before the swap."""
        return self.complete or WRITTEN in self.entries

    def record(
        self, entry: str, digests: Mapping[str, str] | None = None, note: Any = None, files: Iterable[Path] = ()
    ) -> None:
        """Record a finished entry and a JSON note. Its bytes must be on disk already. Several threads may record.

        Args:
            entry: name of the entry.
            digests: tensor of the entry → hex SHA-256.
            note: JSON.
            files: its files below the folder, which a resumed run reads.
        """
        self.trust(entry, files)
        with _RECORDING:
            self.entries[entry] = dict(sorted((digests or {}).items()))
            if note is not None:
                self.notes[entry] = note
            self.save()

    def trust(self, entry: str, files: Iterable[Path]) -> None:
        """Note digests of files that an entry will stand on; `record` or `save` writes them."""
        names = [path.relative_to(self.folder).as_posix() for path in files]
        if names:
            self.files[entry] = sha256_files(self.folder, names)

    def has_files(self, entry: str) -> bool:
        """Return whether the files of an entry are those that were noted."""
        try:
            digests = self.files.get(entry, {})
            return sha256_files(self.folder, digests) == digests
        except OSError:
            return False

    def drop_from(self, entry: str) -> None:
        """Forget an entry and all that came after it, as if the run had been stopped before."""
        kept = list(self.entries)[: list(self.entries).index(entry)]
        self.entries = {name: self.entries[name] for name in kept}
        self.files = {name: own for name, own in self.files.items() if name in self.entries}
        self.notes = {name: note for name, note in self.notes.items() if name in self.entries}

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
    """Return whether a run of this tool left a folder: it has a journal, or was killed before writing its first."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    return (folder / JOURNAL).is_file() or all(path.name == _FRESH for path in folder.iterdir())


def refuse_unfinished(folder: Path) -> None:
    """Refuse to treat the staging folder of an unfinished run as an output, unless only exports are left to do."""
    # A kill may leave the journal for a moment in a finished output: the name tells.
    if not (folder.absolute().name.endswith(".partial") and (folder / JOURNAL).is_file()):
        return
    try:
        journal = Journal.read(folder)
        if journal.is_written:
            return
        resumable = journal.resumable
    except ValueError:
        resumable = False
    goes_on = "goes on with --resume, or " if resumable else ""
    raise UserError(f"{folder} is an unfinished run: the command that began it {goes_on}starts afresh with --overwrite")
