"""LoRA adapters as peft saves them: read as the weights that they are added to, one tensor at a time."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.model_folder import ADAPTER_CONFIG
from ckpt_prune.checkpoint.shard import Adapter, TensorInfo, read_header
from ckpt_prune.common.errors import UserError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_SLOW_PATTERN = re.compile(r"\)[*+{]|([*+{].*){5}")
"""A repeated group, or many repetitions: comparing one may take for ever."""
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_MORE = (
    *("modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters", "lora_bias"),
    *("alora_invocation_tokens", "arrow_config", "monteclora_config", "velora_config", "kasa_config"),
)
"""Keys of peft's config that make an adapter more than a product of two matrices."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training that change the base model's own weights, which the adapter then needs."""


def base_of_adapter(folder: Path) -> str:
    """Return the model that an adapter was trained on: a folder or a Hub id. UserError if it is no plain LoRA."""
    config = read_json_object(folder / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{folder} is an adapter of type {kind}, and only LoRA's are merged: merge it with peft")
    more = [key for key in _MORE if config.get(key)]
    more += [key for key in config if key.startswith("use_") and config[key] and key != "use_rslora"]
    more += ["bias"] if config.get("bias", "none") != "none" else []
    start = config.get("init_lora_weights")
    more += ["init_lora_weights"] if isinstance(start, str) and start.startswith(_CHANGES_BASE) else []
    if more:
        raise UserError(
            f"{folder} is not a plain LoRA adapter ({more[0]}: {config[more[0]]!r} in {ADAPTER_CONFIG}): merge it with "
            "peft's merge_and_unload"
        )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{folder / ADAPTER_CONFIG} names no base model: put its folder into base_model_name_or_path")
    sibling = folder / base
    return str(sibling) if not Path(base).exists() and (sibling / "config.json").is_file() else base


def attach_adapter(folder: Path, base: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors of a base model as they are read with an adapter: W + factor · B A.

    UserError if a tensor of the adapter has no place in the base, another shape than its config says, or no partner.
    """
    config = read_json_object(folder / ADAPTER_CONFIG)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{folder} has no {ADAPTER_WEIGHTS}; save the adapter with peft's save_pretrained")
    stored = read_header(folder / ADAPTER_WEIGHTS).tensors
    downs = {name.removesuffix(_DOWN): info for name, info in stored.items() if name.endswith(_DOWN)}
    ups = {name.removesuffix(_UP): info for name, info in stored.items() if name.endswith(_UP)}
    others = stored.keys() - {f"{module}{_DOWN}" for module in ups} - {f"{module}{_UP}" for module in downs}
    if others or not downs:
        what = f"tensor {min(others)!r}, which is no matrix of a plain LoRA" if others else "no tensor"
        raise UserError(f"{folder / ADAPTER_WEIGHTS} has {what}: merge it with peft's merge_and_unload")
    adapted = dict(tensors)
    for module, down in downs.items():
        path = module.removeprefix(_PREFIX)
        name = _find_weight(path, tensors)
        if name is None:
            raise UserError(
                f"{folder} adapts {path}, which {base} does not have: base_model_name_or_path names another model than "
                "the adapter was trained on"
            )
        rank, alpha = (_number(config, key, path, folder) for key in ("r", "lora_alpha"))
        up, info, flat = ups[module], tensors[name], bool(config.get("fan_in_fan_out"))
        outputs, inputs = info.stored_shape[::-1] if flat else info.stored_shape
        if (
            not down.dtype.is_floating_point
            or not up.dtype.is_floating_point
            or rank < 1
            or down.shape != (rank, inputs)
            or up.shape != (outputs, rank)
        ):
            raise UserError(
                f"{folder}: the matrices for {path} are {list(down.shape)} and {list(up.shape)}, which are no adapter "
                f"of rank {rank:g} for {[outputs, inputs]}, the shape in {base}"
            )
        factor = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        place = str((folder / ADAPTER_WEIGHTS).absolute())
        matrices = replace(down, file=place), replace(up, file=place)
        adapted[name] = replace(info, adapter=Adapter(*matrices, factor, transposed=flat))
    return adapted


def check_added_tokens(folder: Path, base: Path, config: Mapping[str, Any]) -> None:
    """Refuse an adapter whose tokenizer adds tokens that its base's embedding has no rows for."""
    added, known = (_added_tokens(each) for each in (folder, base))
    rows = next(
        (part["vocab_size"] for part in (config, config.get("text_config")) if part and "vocab_size" in part), 0
    )
    beyond = sorted(index for index in added.keys() - known.keys() if isinstance(rows, int) and index >= rows > 0)
    if beyond:
        raise UserError(
            f"{folder}: its tokenizer adds {added[beyond[0]]!r} as token {beyond[0]}, and the embedding of {base} has "
            f"{rows} rows: merge it with peft after the embedding is resized"
        )


def _added_tokens(folder: Path) -> dict[int, str]:
    path = folder / "tokenizer.json"
    entries = read_json_object(path).get("added_tokens") if path.is_file() else None
    entries = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    return {each["id"]: str(each.get("content")) for each in entries if isinstance(each.get("id"), int)}


def _find_weight(module: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the weight of a module. A file may leave out the prefix that the class with a head adds, or have it."""
    name = f"{module}.weight"
    matches = [each for each in tensors if each == name or name.endswith(f".{each}") or each.endswith(f".{name}")]
    matches = [name] if name in matches else matches
    return matches[0] if len(matches) == 1 and len(tensors[matches[0]].shape) == 2 else None


def _number(config: Mapping[str, Any], key: str, module: str, folder: Path) -> int | float:
    """Return rank or alpha of a module: as peft, by the first pattern that its path ends with, else the common one."""
    patterns = config.get({"r": "rank_pattern", "lora_alpha": "alpha_pattern"}[key])
    patterns = patterns if isinstance(patterns, dict) else {}
    if slow := next((pattern for pattern in patterns if _SLOW_PATTERN.search(pattern)), None):
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: the pattern {slow[:60]!r} repeats too much to be compared in time: write the "
            "names of the modules out"
        )
    value = next((number for pattern, number in patterns.items() if _ends_with(module, pattern)), config.get(key))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{folder / ADAPTER_CONFIG}: {key} of {module} is {value!r}, not a number")
    return value


def _ends_with(module: str, pattern: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error:
        return module.endswith(pattern)
