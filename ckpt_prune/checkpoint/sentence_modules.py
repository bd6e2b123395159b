"""What a sentence-transformers folder does with a model's last hidden states: `modules.json` and its sub-folders."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError

MODULES = "modules.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
SENTENCE_SETTINGS = "config_sentence_transformers.json"
WEIGHTS = "model.safetensors"
"""Of a module, in its own folder."""
_PICKLE = "pytorch_model.bin"

ModulesUse = Literal["sentence-similarity", "text-ranking"]
"""What modules make of a model, in the words of the Hub."""
SentenceClass = Literal["SentenceTransformer", "CrossEncoder", "SparseEncoder"]


@dataclass(frozen=True)
class Module:
    """One step of such a model, in order.

    Attributes:
        kind: the last part of its class's name: Transformer, Pooling, Normalize, Dense.
        folder: the sub-folder with its files; None where they stand in the folder itself.
    """

    kind: str
    folder: str | None


def read_modules(folder: Path) -> list[Module]:
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


def find_sentence_use(folder: Path) -> ModulesUse | None:
    """What a sentence-transformers folder uses its model for, whatever class config.json names.

    Returns:
        sentence-similarity if the last hidden states are read, as embedders do, so that a head is never used;
        text-ranking if scores are the logits of tokens such as yes and no; None if the class at hand says it: in a
        sparse encoder, a cross-encoder with a head for texts, and any other folder.

    Raises:
        UserError: as `modules_of`.
    """
    modules = read_modules(folder)
    if modules[:1] != [Module("Transformer", None)]:
        return None
    path = folder / TRANSFORMER_SETTINGS
    task = (read_json_object(path) if path.is_file() else {}).get("transformer_task", "feature-extraction")
    if task == "feature-extraction":
        return "sentence-similarity"
    return "text-ranking" if task == "text-generation" and _ranking(modules) is not None else None


def read_ranked_tokens(folder: Path) -> tuple[int, int | None]:
    """The token whose logit is a text's score, and the one whose logit is taken from it, or None.

    Args:
        folder: whose use is text-ranking.

    Raises:
        UserError: its module does not name them.
    """
    module = _ranking(read_modules(folder))
    path = folder / ((module and module.folder) or "") / "config.json"
    settings = read_json_object(path)
    true, false = settings.get("true_token_id"), settings.get("false_token_id")
    if not isinstance(true, int) or not isinstance(false, int | None):
        raise UserError(f"{path} names no true_token_id, or a false_token_id that is no number")
    return true, false


def _ranking(modules: Sequence[Module]) -> Module | None:
    return next((module for module in modules if module.kind == "LogitScore"), None)


def find_sentence_class(folder: Path, config: Mapping[str, Any]) -> SentenceClass | None:
    """The class of sentence-transformers that loads a folder, or None if that package did not write it.

    Args:
        folder: of a checkpoint.
        config: its config.json, where older cross-encoders say that they are some.

    Raises:
        UserError: as `modules_of`.
    """
    path = folder / SENTENCE_SETTINGS
    named = (read_json_object(path) if path.is_file() else {}).get("model_type")
    if named in get_args(SentenceClass):
        return cast(SentenceClass, named)
    kinds = [module.kind for module in read_modules(folder)]
    if any(kind.startswith(("MLMTransformer", "Splade", "Sparse")) for kind in kinds):
        return "SparseEncoder"
    if kinds:
        return "SentenceTransformer"
    return "CrossEncoder" if "sentence_transformers" in config else None


def find_module_files(folder: Path) -> dict[str, Path]:
    """The files of a sentence-transformers folder's modules, by their names below it: configs, and weights of layers.

    Raises:
        UserError: as `modules_of`; or a layer's weights are there as a pickle only.
    """
    found: dict[str, Path] = {}
    for own in dict.fromkeys(each.folder for each in read_modules(folder) if each.folder is not None):
        place = folder / own
        if (place / _PICKLE).is_file() and not (place / WEIGHTS).is_file():
            raise UserError(f"{place} has its weights in {_PICKLE} only, a pickle: store them as {WEIGHTS}")
        if place.is_dir():
            files = (path for path in sorted(place.iterdir()) if path.is_file() and not path.name.startswith("."))
            found |= {f"{own}/{path.name}": path for path in files if path.suffix in (".json", ".safetensors")}
    return found
