"""Modules of sentence-transformers folders: what is done with a model's last hidden states (`modules.json`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError

MODULES = "modules.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
SENTENCE_SETTINGS = "config_sentence_transformers.json"
WEIGHTS = "model.safetensors"
"""Name of the file with the weights of a module, in the folder of that module."""
_PICKLE = "pytorch_model.bin"
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""Way to pool → key that is true in the config.json of older versions; several are put together in this order."""

ModulesUse = Literal["sentence-similarity", "text-ranking"]
"""Use of a model by its modules, in the Hub's terms."""
SentenceClass = Literal["SentenceTransformer", "CrossEncoder", "SparseEncoder"]


@dataclass(frozen=True)
class Module:
    """One step of a sentence-transformers model.

    Attributes:
        kind: last part of its class's name: Transformer, Pooling, Normalize, Dense.
        folder: sub-folder with its files; None if they are in the folder itself.
    """

    kind: str
    folder: str | None


def read_modules(folder: Path) -> list[Module]:
    """Read the modules of a folder in order; none if it is not of sentence-transformers."""
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        entries = json.loads(read_input(path))
        modules = [Module(str(entry["type"]).rpartition(".")[2], str(entry["path"]) or None) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not the list of modules that sentence-transformers writes") from error
    for inside in filter(None, (module.folder for module in modules)):
        if Path(inside).name != inside or inside.startswith("."):
            raise UserError(f"{path} names {inside}, which is no folder inside {folder}")
    return modules


def read_pooling(place: Path) -> list[str]:
    """Return how a module Pooling in a folder pools, mostly by keys of `POOLING_KEYS`; none if it does not say."""
    settings = read_json_object(place / "config.json")
    stated = settings.get("pooling_mode")  # newer versions name one, or several
    if not stated:
        return [mode for mode, key in POOLING_KEYS.items() if settings.get(key) is True]
    return [str(each).split("_token")[0] for each in (stated if isinstance(stated, list) else [stated])]


def find_sentence_use(folder: Path) -> ModulesUse | None:
    """Return what a sentence-transformers folder uses its model for, whatever class config.json names.

    Returns:
        sentence-similarity if the last hidden states are read, as in embedders, so that a head is never used;
        text-ranking if scores are the logits of tokens such as yes and no; None if the model's class decides: in a
        sparse encoder, a cross-encoder with a head for texts, and any other folder.
    """
    modules = read_modules(folder)
    if modules[:1] != [Module("Transformer", None)]:
        return None
    task = _read_optional(folder / TRANSFORMER_SETTINGS).get("transformer_task", "feature-extraction")
    if task == "feature-extraction":
        return "sentence-similarity"
    return "text-ranking" if task == "text-generation" and _find_ranking(modules) is not None else None


def read_ranked_tokens(folder: Path) -> tuple[int, int | None]:
    """Return the token whose logit is a text's score, and the one to subtract, in a text-ranking model."""
    module = _find_ranking(read_modules(folder))
    path = folder / ((module and module.folder) or "") / "config.json"
    settings = read_json_object(path)
    true, false = settings.get("true_token_id"), settings.get("false_token_id")
    if not isinstance(true, int) or not isinstance(false, int | None):
        raise UserError(f"{path} names no true_token_id, or a false_token_id that is no number")
    return true, false


def _find_ranking(modules: Sequence[Module]) -> Module | None:
    return next((module for module in modules if module.kind == "LogitScore"), None)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def find_sentence_class(folder: Path, config: Mapping[str, Any]) -> SentenceClass | None:
    """Return the class of sentence-transformers that loads a checkpoint; None if that package did not write it.

    Older cross-encoders are recognised by their config.json, `config`.
    """
    named = _read_optional(folder / SENTENCE_SETTINGS).get("model_type")
    if named in get_args(SentenceClass):
        return cast(SentenceClass, named)
    kinds = [module.kind for module in read_modules(folder)]
    if any(kind.startswith(("MLMTransformer", "Splade", "Sparse")) for kind in kinds):
        return "SparseEncoder"
    if kinds:
        return "SentenceTransformer"
    return "CrossEncoder" if "sentence_transformers" in config else None


def check_module_weights(folder: Path) -> set[str]:
    """Return the sub-folders of a folder's modules; UserError if the weights of one are pickled."""
    names = {module.folder for module in read_modules(folder) if module.folder is not None}
    for name in sorted(names):
        place = folder / name
        if (place / _PICKLE).is_file() and not (place / WEIGHTS).is_file():
            raise UserError(f"{place} has its weights in {_PICKLE} only, a pickle: store them as {WEIGHTS}")
    return names
