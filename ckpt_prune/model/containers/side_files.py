"""What travels unchanged from a checkpoint into what is made of it."""

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
"""Where both a checkpoint and its graph are in one folder."""


def find_side_files(folder: Path) -> dict[str, Path]:
    """Files that travel unchanged with a copy, by name: tokenizer, image processor, generation config, licence.

    Top-level regular files, sorted, without weights of any format, code, hidden files and what copies write anew; and
    those of a sentence-transformers folder's modules, whose names have their folder and a slash.

    Raises:
        UserError: what `modules.json` names cannot travel, a name holds more than text, or a file is a link out of the
            folder. Whoever wrote the folder would else have a file published that is not theirs.
    """
    found = sorted(path for path in folder.iterdir() if path.is_file() and _is_side_file(path))
    own = {path.name: path for path in found} | find_module_files(folder)
    for name, path in own.items():
        if not has_no_controls(name):
            raise UserError(f"{path} has control characters in its name, or what is no Unicode; rename it")
        _check_link(path, folder.resolve())
    return own


def top_names(files: Mapping[str, Path]) -> dict[str, Path | None]:
    """Names at the top of a folder that holds such files → the file; None of folders."""
    return {name.partition("/")[0]: None if "/" in name else path for name, path in files.items()}


def carried_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """The side files of a checkpoint, once it is known that they and its config are what they were when it was opened.

    Raises:
        UserError: one changed meanwhile, is gone, or is a link out of the folder.
    """
    then = [checkpoint.path / name for name in checkpoint.stamps]
    checkpoint.check_unchanged([CONFIG, *(path.name for path in then if _is_side_file(path))])
    found = find_side_files(checkpoint.path)
    return {name: path for name, path in found.items() if "/" in name or name in checkpoint.stamps}


def _check_link(path: Path, folder: Path) -> None:
    if not path.is_symlink():
        return
    target = path.resolve()
    # The Hub's cache is all links to ../../blobs.
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
