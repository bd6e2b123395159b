"""What travels unchanged from a checkpoint into what is made of it."""

from collections.abc import Mapping
from pathlib import Path

from ckpt_prune.checkpoint.modules import module_files
from ckpt_prune.checkpoint.reading import CONFIG, PICKLES
from ckpt_prune.filenames import CONVERTED, EXPORT_ERROR, GRAPH_RECORD, REPORT, ROTATIONS, VALIDATION

_NOT_CARRIED = PICKLES | {".safetensors", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf", ".py"}
_REWRITTEN = {CONFIG, CONVERTED, "README.md", REPORT, ROTATIONS}
_OF_A_GRAPH = {GRAPH_RECORD, VALIDATION}
"""Where both a checkpoint and its graph are in one folder."""


def side_files(folder: Path) -> dict[str, Path]:
    """Files that travel unchanged with a copy, by name: tokenizer, image processor, generation config, licence.

    Top-level regular files, sorted, without weights of any format, code, hidden files and what copies write anew; and
    those of a sentence-transformers folder's modules, whose names have their folder and a slash.

    Raises:
        UserError: what `modules.json` names cannot travel.
    """
    found = sorted(path for path in folder.iterdir() if path.is_file() and _is_side_file(path))
    exported = (folder / GRAPH_RECORD).is_file()
    own = {path.name: path for path in found if not (exported and path.name in _OF_A_GRAPH)}
    return own | module_files(folder)


def top_names(files: Mapping[str, Path]) -> dict[str, Path | None]:
    """Names at the top of a folder that holds such files → the file; None of folders."""
    return {name.partition("/")[0]: None if "/" in name else path for name, path in files.items()}


def _is_side_file(path: Path) -> bool:
    name = path.name
    return not (
        name.startswith(".")
        or name in _REWRITTEN
        or name.endswith((".index.json", ".onnx.data", EXPORT_ERROR))
        or path.suffix.lower() in _NOT_CARRIED
    )
