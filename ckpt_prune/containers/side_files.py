"""What travels unchanged from a checkpoint into what is made of it."""

from pathlib import Path

from ckpt_prune.checkpoint.reading import CONFIG, PICKLES, Checkpoint
from ckpt_prune.errors import UserError
from ckpt_prune.filenames import EXPORT_ERROR, GRAPH_RECORD, REPORT, ROTATIONS, VALIDATION

_NOT_CARRIED = PICKLES | {".safetensors", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf", ".py"}
_REWRITTEN = {CONFIG, "README.md", REPORT, ROTATIONS}
_OF_A_GRAPH = {GRAPH_RECORD, VALIDATION}
"""Where both a checkpoint and its graph are in one folder."""


def side_files(folder: Path) -> list[Path]:
    """Files that travel unchanged with a copy: tokenizer, image processor, generation config, licence.

    Top-level regular files, sorted, without weights of any format, code, hidden files and what copies write anew.

    Raises:
        UserError: one is a link out of the folder. Whoever wrote the folder would else have a file published that is
            not theirs.
    """
    found = sorted(path for path in folder.iterdir() if path.is_file() and _is_side_file(path))
    for path in found:
        _check_link(path)
    return found


def carried(checkpoint: Checkpoint) -> list[Path]:
    """The side files of a checkpoint, once it is known that they and its config are what they were when it was opened.

    Raises:
        UserError: one changed meanwhile, is gone, or is a link out of the folder.
    """
    then = [checkpoint.path / name for name in checkpoint.stamps]
    checkpoint.check_unchanged([CONFIG, *(path.name for path in then if _is_side_file(path))])
    return [path for path in side_files(checkpoint.path) if path.name in checkpoint.stamps]


def _check_link(path: Path) -> None:
    if not path.is_symlink():
        return
    folder, target = path.parent.resolve(), path.resolve()
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
