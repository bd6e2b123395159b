"""Files that travel unchanged from a checkpoint into its outputs, and those that do not, with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_prune.checkpoint.adapters import ADAPTER_WEIGHTS
from ckpt_prune.checkpoint.checkpoint import CONFIG, INDEX, PICKLE_SUFFIXES, SINGLE, Checkpoint
from ckpt_prune.checkpoint.digests import READER_FILES, TOKENIZER_FILES
from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.model_folder import ADAPTER_CONFIG
from ckpt_prune.checkpoint.sentence_modules import check_module_weights
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import (
    CONVERSION_RECORD,
    EXPORT_ERROR,
    GENAI,
    GRAPH_RECORD,
    QUANTISED_RECORD,
    RECIPE,
    REPORT,
    ROTATIONS,
    VALIDATION,
)
from ckpt_prune.common.safe_text import has_no_controls, to_one_line

_REWRITTEN = {
    *(CONFIG, INDEX, "README.md", ADAPTER_CONFIG, "modeling_pruned.py", "mlx_pruned.py"),
    *(CONVERSION_RECORD, REPORT, ROTATIONS, QUANTISED_RECORD),
    RECIPE,
}
"""Files that outputs have anew, or that are merged into their weights. Nobody misses them."""
_OF_A_GRAPH = {GENAI, GRAPH_RECORD, VALIDATION}
"""Files of a graph that is in the folder of its checkpoint."""
_OTHER_FORMATS = {
    *(".safetensors", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite", ".npz", ".nemo"),
    *(".mlmodel", ".engine"),
}
_PICKLE, _CODE, _HIDDEN = "pickled", "code", "hidden"
_WEIGHTS = "weights that are not the model's"
_NAMED = 6
"""So many files are named for each reason."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_MORE_TEMPLATES = "additional_chat_templates/"


@dataclass(frozen=True)
class SideFiles:
    """The files of a folder that copies of the model carry, and what they leave out.

    Attributes:
        files: names below the folder, with slashes → the files, sorted.
        left_out: names of files, or of folders with a slash at the end → why they are left out.
    """

    files: dict[str, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str | None:
        """Say what copies leave out, by reason; None if they have everything."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            reasons.setdefault(reason, []).append(name)
        parts = []
        for reason, names in reasons.items():
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            parts.append(f"{', '.join(names[:_NAMED])}{more} ({reason})")
        return to_one_line(f"left out of the output: {'; '.join(parts)}") if parts else None


def find_side_files(folder: Path) -> SideFiles:
    """Find the files that travel unchanged with a copy: tokenizer, image processor, generation config, licence...

    Those of sub-folders travel, too, but of one that holds weights only if it is a module of a sentence-transformers
    folder. Left out are weights, code, hidden files and links to folders.

    Raises:
        UserError: a module's weights cannot travel, a name has control characters, or a file is a link out of the
            folder, which would publish a file that is not the folder's.
    """
    modules = check_module_weights(folder)
    side_files = SideFiles()
    weights = _weights_of(folder)
    # Of an output that lacks nothing but its exports: its journal, and what was measured.
    being_written = (JOURNAL, "measured") if (folder / JOURNAL).is_file() else ()
    for path in sorted(folder.iterdir()):
        name = path.name
        if name in being_written:
            continue
        if path.is_dir() and not path.is_symlink():
            if name.endswith(".partial") or (path / JOURNAL).is_file():
                continue  # an output that is being written
            if not name.startswith(".") and name not in modules and _holds_weights(path):
                side_files.left_out[f"{name}/"] = _WEIGHTS
                continue
        elif name in weights or name in _REWRITTEN or _is_of_graph(path):
            continue
        _sort(path, name, side_files, module=name in modules)
    for name, path in side_files.files.items():
        if not has_no_controls(name):
            raise UserError(f"{path} has control characters in its name, or is not Unicode; rename it")
        _check_link(path, folder.resolve())
    return side_files


def _sort(path: Path, name: str, found: SideFiles, *, module: bool) -> None:
    """Put a file, or all files of a folder, where they belong."""
    reason = _why_left_out(name.rpartition("/")[2], module=module)
    if path.is_dir() and (reason is not None or path.is_symlink()):
        found.left_out[f"{name}/"] = reason or "a link to a folder"
    elif path.is_dir():
        for inner in sorted(path.iterdir()):
            _sort(inner, f"{name}/{inner.name}", found, module=module)
    elif reason is not None or not path.is_file():
        found.left_out[name] = reason or "no regular file"
    else:
        found.files[name] = path


def _why_left_out(name: str, *, module: bool = False) -> str | None:
    """Say by its name why a file does not travel; None if it does."""
    suffix = Path(name).suffix.lower()
    if name.startswith("."):
        return _HIDDEN
    if suffix in (".py", ".pyc") or name == "__pycache__":
        return _CODE
    if suffix in PICKLE_SUFFIXES:
        return _PICKLE
    if module and suffix == ".safetensors":
        return None
    return _WEIGHTS if suffix in _OTHER_FORMATS or name.endswith((".index.json", ".onnx.data")) else None


def _weights_of(folder: Path) -> set[str]:
    """Return the names of the files that the model's own weights are in, those of an adapter included."""
    adapter = {ADAPTER_WEIGHTS} if (folder / ADAPTER_CONFIG).is_file() else set()
    if (folder / SINGLE).exists() or not (folder / INDEX).is_file():
        return {SINGLE} | adapter
    shards = read_json_object(folder / INDEX).get("weight_map")
    return {str(name) for name in shards.values()} | adapter if isinstance(shards, dict) else adapter


def _holds_weights(folder: Path) -> bool:
    return any(_why_left_out(path.name) in (_PICKLE, _WEIGHTS) for path in folder.rglob("*"))


def _is_of_graph(path: Path) -> bool:
    is_record = path.name in _OF_A_GRAPH and (path.parent / GRAPH_RECORD).is_file()
    return is_record or path.name.endswith(EXPORT_ERROR)


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


# ---- of a checkpoint ---------------------------------------------------------------------------------------------


def name_left_out(checkpoint: Checkpoint, out: Path) -> str | None:
    """Return a line on the files of a checkpoint that a copy in `out` leaves out, but for `out` itself."""
    side_files = side_files_of(checkpoint)
    if out.resolve().parent in {place.resolve() for place in (checkpoint.path, checkpoint.adapter) if place}:
        side_files.left_out.pop(f"{out.name}/", None)
    return side_files.line


def side_files_of(checkpoint: Checkpoint) -> SideFiles:
    """Return the side files of a checkpoint. What the folder of a merged adapter has goes before its base's."""
    base = find_side_files(checkpoint.path)
    if checkpoint.adapter in (None, checkpoint.path):
        return base
    assert checkpoint.adapter is not None
    adapter = find_side_files(checkpoint.adapter)
    replaced = {name for name in base.files if name in adapter.files or _stands_back(name, adapter.files)}
    left_out = {name: reason for each in (base, adapter) for name, reason in each.left_out.items()}
    for folder, inside in ((checkpoint.path, checkpoint.adapter), (checkpoint.adapter, checkpoint.path)):
        if inside.resolve().parent == folder.resolve():
            left_out.pop(f"{inside.resolve().name}/", None)
    left_out |= dict.fromkeys(sorted(replaced), "the adapter's folder has its own")
    kept = {name: path for name, path in base.files.items() if name not in replaced}
    return SideFiles(dict(sorted((kept | adapter.files).items())), left_out)


def _stands_back(name: str, own: Mapping[str, Path]) -> bool:
    """Whether a file of a base is of a tokenizer, or a chat template, that its adapter's folder has in its place."""
    has_vocabulary = any(each in _VOCABULARIES or each.endswith(".tiktoken") for each in own)
    if _is_template(name):
        return has_vocabulary or any(_is_template(each) for each in own)
    return has_vocabulary and _is_of_tokenizer(name)


def _is_template(name: str) -> bool:
    return name in _TEMPLATES or name.startswith(_MORE_TEMPLATES)


def _is_of_tokenizer(name: str) -> bool:
    return name in TOKENIZER_FILES or name.endswith((".model", ".tiktoken"))


def reader_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """Return the files of a checkpoint with a merged adapter that turn data into its input, by name."""
    files = side_files_of(checkpoint).files
    return {
        name: path
        for name, path in files.items()
        if name in READER_FILES or _is_template(name) or _is_of_tokenizer(name)
    }


def carried_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """Return the side files of a checkpoint; UserError if they or its config changed since it was opened."""
    places = {name: checkpoint.stamp_name(path) for name, path in side_files_of(checkpoint).files.items()}
    at_top = [name for name in checkpoint.stamps if "/" not in name]
    gone = [name for name in at_top if name not in _REWRITTEN and _why_left_out(name) is None]
    carried = {name: place for name, place in places.items() if place in checkpoint.stamps}
    checkpoint.check_unchanged([CONFIG, *gone, *carried.values()])
    return {name: checkpoint.path / place for name, place in carried.items()}


def top_names(files: Mapping[str, Path]) -> dict[str, Path | None]:
    """Return the names at the top of a folder with such files → the file; None for folders."""
    return {name.partition("/")[0]: None if "/" in name else path for name, path in files.items()}
