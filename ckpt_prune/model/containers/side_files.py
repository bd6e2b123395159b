"""Files that travel unchanged from a checkpoint into its outputs."""

from collections.abc import Mapping
from pathlib import Path

from ckpt_prune.checkpoint.checkpoint import CONFIG, PICKLE_SUFFIXES, Checkpoint
from ckpt_prune.checkpoint.sentence_modules import find_module_files
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import (
    CONVERSION_RECORD,
    EXPORT_ERROR,
    GENAI,
    GRAPH_RECORD,
    QUANTISED_RECORD,
    REPORT,
    ROTATIONS,
    VALIDATION,
)
from ckpt_prune.common.safe_text import has_no_controls

_NOT_CARRIED = PICKLE_SUFFIXES | {".safetensors", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf", ".py"}
_REWRITTEN = {CONFIG, CONVERSION_RECORD, "README.md", REPORT, ROTATIONS, QUANTISED_RECORD}
_OF_A_GRAPH = {GENAI, GRAPH_RECORD, VALIDATION}
"""Files of a graph that is in the folder of its checkpoint."""


def find_side_files(folder: Path) -> dict[str, Path]:
    """Return the files that travel unchanged with a copy, by name: tokenizer, image processor, generation config...

    Top-level regular files, sorted, without weights of any format, code, hidden files and files that copies write anew;
    and those of a sentence-transformers folder's modules, whose names have their folder and a slash. UserError if a
    module's file cannot travel, if a name has control characters, or if a file is a link out of the folder, which would
    publish a file that is not the folder's.
    """
    top = sorted(path for path in folder.iterdir() if path.is_file() and _is_side_file(path))
    files = {path.name: path for path in top} | find_module_files(folder)
    for name, path in files.items():
        if not has_no_controls(name):
            raise UserError(f"{path} has control characters in its name, or what is no Unicode; rename it")
        _check_link(path, folder.resolve())
    return files


def top_names(files: Mapping[str, Path]) -> dict[str, Path | None]:
    """Return the names at the top of a folder with such files → the file; None for folders."""
    return {name.partition("/")[0]: None if "/" in name else path for name, path in files.items()}


def carried_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """Return the side files of a checkpoint; UserError if they or its config changed since it was opened."""
    stamped = [checkpoint.path / name for name in checkpoint.stamps]
    checkpoint.check_unchanged([CONFIG, *(path.name for path in stamped if _is_side_file(path))])
    files = find_side_files(checkpoint.path)
    return {name: path for name, path in files.items() if "/" in name or name in checkpoint.stamps}


def _check_link(path: Path, folder: Path) -> None:
    if not path.is_symlink():
        return
    target = path.resolve()
    # The Hub's cache consists of links to ../../blobs.
    blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(target.is_relative_to(root) for root in (folder, *blobs)):
        raise UserError(
            f"{path} is a link out of its folder, and what it leads to would be in the output; put the file itself "
            "there, or remove the link"
        )


def _is_side_file(path: Path) -> bool:
    name = path.name
    if name in _OF_A_GRAPH and (path.parent / GRAPH_RECORD).is_file():
        return False
    return not (
        name.startswith(".")
        or name in _REWRITTEN
        or name.endswith((".index.json", ".onnx.data", EXPORT_ERROR))
        or path.suffix.lower() in _NOT_CARRIED
    )
