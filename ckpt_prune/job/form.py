"""The form of an output: the record that it carries, and its model card."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.checkpoint.folder_kinds import OUTPUT_KIND, FolderKind

if TYPE_CHECKING:
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.job.run import Run


@dataclass(frozen=True)
class Form:
    """How an output describes itself.

    Attributes:
        read: returns the record of a finished folder, or None if it has none.
        make: returns the record, from the job at its end, the records of each stage's step, and the run; None if no
            stages made the output.
        kind: of folder; it names the record's file.
        card: returns the text of README.md for a record that is no report; None if there is no card.
    """

    read: Callable[[Path], Any]
    make: Callable[["Prepared", Mapping[str, Sequence[Any]], "Run"], Any] | None = None
    kind: FolderKind = OUTPUT_KIND
    card: Callable[[Any], str] | None = None
