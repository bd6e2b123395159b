"""What of an output is shared: the files that this tool wrote, and no other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_prune.checkpoint.files import Stamp, find_changed, stamp_of
from ckpt_prune.checkpoint.folder_kinds import EXPORT_KIND, OUTPUT_KIND, FolderKind, find_foreign
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.model_folder import check_output_folder
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD, REPORT
from ckpt_prune.compressing.record import QUANTISATION_KIND


@dataclass(frozen=True)
class Contents:
    """Files of an output.

    Attributes:
        folder: the output.
        kind: of folder.
        files: names in the repository, with slashes, sorted; the same below the folder.
        left_out: what else is in the folder, which this tool did not write.
        stamps: of the files, by name, when they were looked at.
    """

    folder: Path
    kind: FolderKind
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    stamps: Mapping[str, Stamp]

    def bytes(self, name: str) -> int:
        """Size of one of the files."""
        return (self.folder / name).stat().st_size

    def check_unchanged(self) -> None:
        """Refuse to share anything else than what was looked at.

        Raises:
            UserError: naming the first file that changed or is gone.
        """
        if (name := find_changed(self.folder, self.stamps, self.stamps)) is not None:
            raise UserError(f"{self.folder / name} changed while it was verified: push again")


def contents_of(folder: Path) -> Contents:
    """The files of an output, its graph in the folder `onnx` included.

    Raises:
        UserError: it is no output of this tool, or an unfinished one, or one of its files is a link.
    """
    refuse_unfinished(check_output_folder(folder))
    kind = next((kind for kind in (OUTPUT_KIND, QUANTISATION_KIND) if (folder / kind.record).is_file()), None)
    if kind is None:
        raise UserError(f"{folder} has no {REPORT}; give a folder that `prune`, `recover` or `quantize` wrote")
    written = kind.written(folder)
    if (folder / GRAPH_FOLDER / GRAPH_RECORD).is_file():
        written |= {f"{GRAPH_FOLDER}/{name}" for name in EXPORT_KIND.written(folder / GRAPH_FOLDER)}
    files = sorted(name for name in written if (folder / name).is_file())
    for name in files:
        if any(path.is_symlink() for path in (folder / name, *(folder / name).parents) if path.is_relative_to(folder)):
            raise UserError(f"{folder / name} is a link, and what it leads to would be shared; put the file there")
    stamps = {name: stamp_of(folder / name) for name in files}
    return Contents(folder, kind, tuple(files), tuple(find_foreign(folder, written)), stamps)
