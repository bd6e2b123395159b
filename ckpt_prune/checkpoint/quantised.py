"""Quantised checkpoints: plain fp8 and MXFP4 are read as bfloat16, others are refused by name before that."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import GgufFileError, UserError

QUANTISATION_KEY = "quantization_config"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


def _by_transformers(load: str, imported: str = "") -> str:
    return f"python -c \"from transformers import {imported}{{auto}} as M; M.{load}.save_pretrained('NEW')\""


def _by_config(config: str) -> str:
    return _by_transformers(
        f"from_pretrained('{{path}}', quantization_config={config}(dequantize=True))", f"{config}, "
    )


_METHODS = {
    "awq": ("AWQ", None),
    "bitsandbytes": ("bitsandbytes", _by_transformers("from_pretrained('{path}').dequantize()")),
    "compressed-tensors": ("compressed-tensors", _by_config("CompressedTensorsConfig")),
    "fp8": ("fp8", _by_config("FineGrainedFP8Config")),
    "gptq": (
        "GPTQ",
        "python -c \"from gptqmodel.utils.model_dequant import dequantize_model; dequantize_model('{path}', 'NEW')\"",
    ),
}
"""quant_method → its usual name, and a command that makes a plain copy, with `{path}` and `{auto}`, if one is known."""
_BASE_MODEL = re.compile(r"^base_model:\s*(?:\n\s*-\s*)?[\"']?([\w.-]+/[\w.-]+)[\"']?\s*$", re.MULTILINE)


def is_gguf(path: Path) -> bool:
    """Whether a path is a file in GGUF, by its name or by its first bytes: some programs name it after its digest."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def refuse_gguf(path: Path) -> None:
    """Refuse a GGUF file, or a folder whose weights are in one, with the command that makes a checkpoint of it."""
    file = path
    if path.is_dir():
        files = sorted(path.iterdir())
        file = next((each for each in files if each.suffix.lower() == ".gguf"), path)
        if file == path or any(each.suffix in _WEIGHTS for each in files):
            return
    if is_gguf(file):
        command = shlex.join(["ckpt-prune", "convert", str(file), "-o", f"{file.stem}-checkpoint"])
        message = f"{file} is a GGUF file: `{command}` makes a checkpoint of it, which this command takes"
        message += (
            f"; `ckpt-prune validate {shlex.quote(str(file))} --against MODEL` compares it with MODEL in llama.cpp"
        )
        raise GgufFileError(message, file)


def refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a quantised checkpoint by its config alone, unless it is one that is read as plain weights."""
    settings = _find_quantisation(config)
    if settings is None or is_read_as_plain(config):
        return
    method = settings.get("quant_method")
    if not method and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    method = str(method or "unknown method").replace("bitsandbytes_4bit", "bitsandbytes")
    name, convert = _METHODS.get(method, (method, None))
    remedy = _remedy(path, convert and convert.format(path=path, auto=class_name(config)))
    raise UserError(f"{path} is quantised by {name} ({QUANTISATION_KEY} in config.json); {remedy}")


def _find_quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings in config.json, or in a config inside it, for how weights are quantised."""
    for values in (config, *(value for value in config.values() if isinstance(value, dict))):
        settings = values.get(QUANTISATION_KEY)
        if settings is not None:
            return settings if isinstance(settings, dict) else {"quant_method": settings}
    return None


def is_packed(config: Mapping[str, Any]) -> bool:
    """Return whether config.json promises integers of few bits as `quantize` writes them, which transformers loads."""
    settings = config.get(QUANTISATION_KEY)
    return (
        isinstance(settings, dict)
        and settings.get("quant_method") == "compressed-tensors"
        and settings.get("format") == "pack-quantized"
    )


def is_read_as_plain(config: Mapping[str, Any]) -> bool:
    """Return whether weights of a quantised checkpoint are read as bfloat16."""
    return is_plain_fp8(config) or is_mxfp4(config)


def may_keep_form(settings: Mapping[str, Any] | None) -> bool:
    """Return whether a model with fewer experts may have these settings of its source, if no weight changes.

    Scales of activations are not read, and lists of modules may number experts.
    """
    if settings is None or settings.get("quant_method") not in ("fp8", "mxfp4"):
        return False
    lists = [value for value in settings.values() if isinstance(value, list)]
    numbered = any(re.search(r"experts\.\d", str(name)) for names in lists for name in names)
    return not numbered and settings.get("activation_scheme") in (None, "dynamic")


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether config.json promises experts in MXFP4: four bits each, with a power of two for 32 of them."""
    settings = config.get(QUANTISATION_KEY)
    return isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"


def is_plain_fp8(config: Mapping[str, Any]) -> bool:
    """Return whether config.json promises float8 weights with a scale for each tensor, row or block."""
    settings = config.get(QUANTISATION_KEY)
    if not isinstance(settings, dict):
        return False
    if settings.get("quant_method") == "compressed-tensors":
        weights = weight_settings(settings)
        plain = bool(weights) and all(each.get("type") == "float" for each in weights)
        other = settings.get("transform_config") or settings.get("sparsity_config")
        return settings.get("format") == "float-quantized" and plain and not other
    return settings.get("quant_method") == "fp8"


def weight_settings(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings for weights of each group of compressed-tensors."""
    groups = settings.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    return [each for each in weights if isinstance(each, dict)]


def drop_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json for the same model with plain weights."""
    return {key: value for key, value in config.items() if key != QUANTISATION_KEY}


def refuse_by_config(path: Path) -> None:
    """Refuse a quantised checkpoint in a folder that may have no readable config.json yet."""
    try:
        config = read_json_object(path / "config.json")
    except UserError:  # reported when the folder is opened
        return
    refuse_quantised(path, config)


def class_name(config: Mapping[str, Any]) -> str:
    """Return the transformers class that config.json names, for a command to copy."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isidentifier() else "AutoModelForCausalLM"


def _remedy(folder: Path, convert: str | None) -> str:
    """Say what to do: take the checkpoint that the model card names, or run the command."""
    base = _find_base_model(folder)
    if base is not None:
        return f"its README.md names the checkpoint it was made from: `hf download {base}`"
    if convert is None:
        return "give the checkpoint it was made from"
    return f"give the checkpoint it was made from, or make a plain copy: {convert}"


def _find_base_model(folder: Path) -> str | None:
    """Return the Hub id of the base model that a folder's model card names."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    _, *parts = text.split("---\n", 2) if text.startswith("---\n") else ("",)
    match = _BASE_MODEL.search(parts[0]) if parts else None
    return match[1] if match else None
