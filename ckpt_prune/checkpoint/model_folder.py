"""Finding what a MODEL argument names: a folder, a Hub id whose files are downloaded into the cache, or a graph."""

import os
import re
import shlex
import stat
from pathlib import Path

from ckpt_prune.checkpoint.hub_files import hub_failures
from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.quantised import refuse_by_config, refuse_gguf
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import FRONTIER_COMMANDS, FRONTIER_PRUNED, FRONTIER_RECORD, GRAPH_RECORD
from ckpt_prune.common.graph_types import STACK_FILES
from ckpt_prune.common.similar_names import similar_siblings

# Weights, configurations, tokenizers, model card. Besides chat templates only sentence-transformers' modules have files
# in folders, which are numbered after the model's own (1_Pooling). Never pickles, never code.
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README.md", "LICENSE*", "NOTICE*"]
_UNWANTED = ["[!1-9]*/*", "[1-9][!_]*/*", "*/*/*", "consolidated*.safetensors"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LONGEST_ID = 96
_CACHED = "models--"
"""Precedes the id in the name of a folder of the Hub's cache."""
_GRAPH_SUFFIX = ".onnx"
ADAPTER_CONFIG = "adapter_config.json"


def resolve_model(model: str) -> Path:
    """Return the folder of a checkpoint: `model` itself if it is a folder, else the Hub snapshot of that id.

    Of a snapshot, only safetensors, JSON, text and tokenizer files and the model card are downloaded. With
    `HF_HUB_OFFLINE=1` only the cache is used.
    """
    return find_local_folder(model) or _download(model)


def fetch_config(model: str) -> Path:
    """Return the folder of a checkpoint; of a Hub id only config.json is downloaded, with the card and templates."""
    return find_local_folder(model) or _download(model, config_alone=True)


def find_local_folder(model: str) -> Path | None:
    """Return `model` if it is a folder, or None if it may be a Hub id.

    What is plainly a path is not asked of the Hub, which takes long to say that it has none: `org/name` is a path if
    there is a folder `org`.
    """
    if not model:  # Path("") would be the current folder
        raise UserError("the model's name is empty; give an existing folder or a Hub id such as org/name")
    path = Path(model)
    if _is_folder(path):
        refuse_gguf(path)
        return path
    if not _HUB_ID.fullmatch(model) or len(model) > _LONGEST_ID or model.startswith("."):
        raise UserError(
            f"{model} does not exist{suggest_folders(model)}; give an existing folder or a Hub id such as org/name"
        )
    if "/" in model and _is_folder(path.parent):
        raise UserError(f"the folder {path.parent} has no {path.name}{suggest_folders(model)}; give an existing folder")
    return None


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter. If it also holds a model, transformers puts the adapter on that."""
    return (folder / ADAPTER_CONFIG).is_file()


def refuse_adapter(folder: Path) -> None:
    """Refuse an adapter where a whole model is loaded."""
    if is_adapter(folder):
        raise UserError(
            f"{folder} holds an adapter, and this loads whole models: `ckpt-prune convert {folder} -o MERGED` makes one"
        )


def model_name(folder: Path) -> str:
    """Return the name of a model: of its folder, or the Hub id if the folder is a snapshot in the Hub's cache.

    A folder that is being written has the name that it will have.

    Bytes that are not Unicode, which JSON cannot hold, become U+FFFD.
    """
    place = folder.resolve()
    cached = place.parent.parent.name
    if place.parent.name == "snapshots" and cached.startswith(_CACHED):
        return cached.removeprefix(_CACHED).replace("--", "/")
    name = place.name.removesuffix(".partial") if (place / JOURNAL).is_file() else place.name
    return os.fsencode(name).decode(errors="replace")


def check_output_folder(folder: Path) -> Path:
    """Return the folder of an output, once it exists."""
    if not _is_folder(folder):
        raise UserError(f"{folder} does not exist{suggest_folders(str(folder))}; give a folder that this tool wrote")
    return folder


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False if nothing is there. A file is refused."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # also for a name that no file can have
        return False
    if not stat.S_ISDIR(mode):
        refuse_gguf(path)
        raise UserError(f"{path} is a file; give the folder that holds config.json")
    return True


def suggest_folders(missing: str) -> str:
    """Ask whether folders with similar names were meant, or return nothing."""
    try:
        if missing.startswith("~"):  # which a shell leaves in quotes as it is
            home = Path(missing).expanduser()
            return f" (did you mean {home}?)" if home.is_dir() else ""
    except (OSError, RuntimeError, ValueError):  # unreadable, no such user, no name of a file
        return ""
    near = similar_siblings(Path(missing), Path.is_dir)
    if not near:  # a folder above may be misspelt
        above = similar_siblings(Path(missing).parent, lambda folder: (folder / Path(missing).name).is_dir())
        near = [folder / Path(missing).name for folder in above]
    return f" (did you mean {' or '.join(map(str, near))}?)" if near else ""


def _download(model: str, *, config_alone: bool = False) -> Path:
    # Imported here: most runs name a folder and should not pay for it.
    from huggingface_hub import snapshot_download

    remedy = f"give a folder, or run `hf download {model}` while connected"
    with hub_failures(model, model, given="folder", remedy=remedy, hint=suggest_folders(model)):
        # The config first, since it may refuse the model before any weights are downloaded.
        first = ["config.json", "README.md", "additional_chat_templates/*.jinja"]
        for wanted, unwanted in ((first, None), (_WANTED, _UNWANTED)):
            folder = Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=unwanted))
            refuse_by_config(folder)
            if config_alone:
                break
        return folder


def find_recorded_source(folder: Path) -> Path | None:
    """Return the checkpoint that the best file of a folder of `frontier` was made of; None if it is no longer there."""
    source = _recorded_place(folder)
    return folder / source if source is not None and (folder / source / "config.json").is_file() else None


def way_to_source(folder: Path) -> str:
    """Return, in brackets, the command that makes what the best file of a folder of `frontier` was made of; or none."""
    commands = folder / FRONTIER_COMMANDS
    is_made = _recorded_place(folder) == FRONTIER_PRUNED and commands.is_file()
    return f" (`sh {shlex.quote(str(commands))}` makes {folder / FRONTIER_PRUNED})" if is_made else ""


def _recorded_place(folder: Path) -> str | None:
    record = folder / FRONTIER_RECORD
    place = read_json_object(record).get("source") if record.is_file() else None
    return place if isinstance(place, str) else None


def holds_graphs(folder: Path) -> bool:
    """Return whether a folder is one that `export` wrote, with no checkpoint, though it has a config.json."""
    return (folder / GRAPH_RECORD).is_file() and not any(folder.glob("*.safetensors"))


def find_graph(name: str) -> Path | None:
    """Return the ONNX graph that a name means, or None if it means something else.

    Args:
        name: a graph, which stands next to config.json and tokenizer or image processor; or a folder with one graph and
            no checkpoint.

    Raises:
        UserError: there are several graphs, or they are of the two stacks of an encoder-decoder.
    """
    path = Path(name)
    if path.suffix == _GRAPH_SUFFIX and not path.is_dir():
        if not path.is_file():
            raise UserError(f"{name}: there is no such graph")
        _refuse_stacks(name, [path])
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    graphs = sorted(path.glob(f"*{_GRAPH_SUFFIX}"))
    _refuse_stacks(name, graphs)
    if len(graphs) > 1:
        raise UserError(f"{name} holds {len(graphs)} graphs: give one of them, such as {graphs[0]}")
    return graphs[0] if graphs else None


def _refuse_stacks(name: str, graphs: list[Path]) -> None:
    """Refuse graphs of an encoder-decoder: its decoder's computes nothing without what its encoder's returns."""
    files = {file for of_stack in STACK_FILES.values() for file in of_stack.values()}
    for graph in graphs:
        if graph.name in files:
            what = "is the graph of one stack" if graph == Path(name) else "holds graphs of both stacks"
            raise UserError(
                f"{name} {what} of an encoder-decoder, which run together: `ckpt-prune validate {graph.parent} "
                "--against MODEL --data FILE` compares them with the model that they were exported from"
            )
