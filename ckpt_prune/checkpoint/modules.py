"""What a sentence-transformers folder does with a model's last hidden states: `modules.json` and its sub-folders."""

import json
from dataclasses import dataclass
from pathlib import Path

from ckpt_prune.checkpoint.jsonfile import read_object
from ckpt_prune.errors import UserError

MODULES = "modules.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
WEIGHTS = "model.safetensors"
"""Of a module, in its own folder."""
_PICKLE = "pytorch_model.bin"


@dataclass(frozen=True)
class Module:
    """One step of such a model, in order.

    Attributes:
        kind: the last part of its class's name: Transformer, Pooling, Normalize, Dense.
        folder: the sub-folder with its files; None where they stand in the folder itself.
    """

    kind: str
    folder: str | None


def modules_of(folder: Path) -> list[Module]:
    """The steps of a sentence-transformers folder, in order; none where it is no such folder.

    Raises:
        UserError: `modules.json` cannot be read, or names a place outside the folder.
    """
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        found = [Module(str(each["type"]).rpartition(".")[2], str(each["path"]) or None) for each in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the list of modules that sentence-transformers writes") from error
    for each in found:
        if each.folder is not None and (Path(each.folder).name != each.folder or each.folder.startswith(".")):
            raise UserError(f"{path} names {each.folder}, which is no folder inside {folder}")
    return found


def embeds(folder: Path) -> bool:
    """Whether a folder is a sentence-transformers folder that reads a model's last hidden states, as embedders do.

    Then a head that config.json names is never used. Cross-encoders and sparse encoders use theirs
    (`transformer_task`).

    Raises:
        UserError: as `modules_of`.
    """
    if modules_of(folder)[:1] != [Module("Transformer", None)]:
        return False
    path = folder / TRANSFORMER_SETTINGS
    settings = read_object(path) if path.is_file() else {}
    return bool(settings.get("transformer_task", "feature-extraction") == "feature-extraction")


def module_files(folder: Path) -> dict[str, Path]:
    """The files of a sentence-transformers folder's modules, by their names below it: configs, and weights of layers.

    Raises:
        UserError: as `modules_of`; or a layer's weights are there as a pickle only.
    """
    found: dict[str, Path] = {}
    for own in dict.fromkeys(each.folder for each in modules_of(folder) if each.folder is not None):
        place = folder / own
        if (place / _PICKLE).is_file() and not (place / WEIGHTS).is_file():
            raise UserError(f"{place} has its weights in {_PICKLE} only, a pickle: store them as {WEIGHTS}")
        if place.is_dir():
            files = (path for path in sorted(place.iterdir()) if path.is_file() and not path.name.startswith("."))
            found |= {f"{own}/{path.name}": path for path in files if path.suffix in (".json", ".safetensors")}
    return found
