"""Quantised checkpoints: plain fp8 is read as bfloat16, anything else is refused by name before weights are read."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError

QUANTISATION_KEY = "quantization_config"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


@dataclass(frozen=True)
class Method:
    """A way of quantising.

    Attributes:
        name: as people call it.
        convert: what makes a plain copy, run where its package is installed, with `{path}` and `{auto}`; None where
            nothing that can be vouched for does.
    """

    name: str
    convert: str | None = None


def _by_transformers(load: str, imported: str = "") -> str:
    return f"python -c \"from transformers import {imported}{{auto}} as M; M.{load}.save_pretrained('NEW')\""


_METHODS = {
    "awq": Method("AWQ"),
    "bitsandbytes": Method("bitsandbytes", _by_transformers("from_pretrained('{path}').dequantize()")),
    "compressed-tensors": Method(
        "compressed-tensors",
        _by_transformers(
            "from_pretrained('{path}', quantization_config=CompressedTensorsConfig(dequantize=True))",
            "CompressedTensorsConfig, ",
        ),
    ),
    "fp8": Method(
        "fp8",
        _by_transformers(
            "from_pretrained('{path}', quantization_config=FineGrainedFP8Config(dequantize=True))",
            "FineGrainedFP8Config, ",
        ),
    ),
    "gptq": Method(
        "GPTQ",
        "python -c \"from gptqmodel.utils.model_dequant import dequantize_model; dequantize_model('{path}', 'NEW')\"",
    ),
    "mxfp4": Method(
        "MXFP4",
        _by_transformers(
            "from_pretrained('{path}', quantization_config=Mxfp4Config(dequantize=True))", "Mxfp4Config, "
        ),
    ),
}
_BASE_MODEL = re.compile(r"^base_model:\s*(?:\n\s*-\s*)?[\"']?([\w.-]+/[\w.-]+)[\"']?\s*$", re.MULTILINE)


def refuse_gguf(path: Path) -> None:
    """Refuse a GGUF file, or a folder whose weights are in one.

    Raises:
        UserError: it is, with the command that makes a plain copy.
    """
    file = path
    if path.is_dir():
        names = sorted(path.iterdir())
        file = next((each for each in names if each.suffix.lower() == ".gguf"), path)
        if file == path or any(each.suffix in _WEIGHTS for each in names):
            return
    if file.suffix.lower() == ".gguf" and file.is_file():
        convert = _by_transformers(f"from_pretrained('{file.parent}', gguf_file='{file.name}')")
        raise UserError(
            f"{file} is GGUF, whose weights are quantised; {_remedy(file.parent, convert.format(auto=class_name({})))}"
        )


def refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose weights cannot be read as numbers, by its config alone.

    Args:
        path: its folder.
        config: its config.json.

    Raises:
        UserError: it is quantised, and not in a plain fp8 that is read as it is.
    """
    found = quantisation(config)
    if found is None or is_plain_fp8(config):
        return
    said = found.get("quant_method") or ("bitsandbytes" if _of_bitsandbytes(found) else None)
    method = _METHODS.get(str(said).replace("bitsandbytes_4bit", "bitsandbytes"), Method(str(said or "unknown method")))
    convert = None if method.convert is None else method.convert.format(path=path, auto=class_name(config))
    raise UserError(
        f"{path} is quantised by {method.name} ({QUANTISATION_KEY} in config.json); {_remedy(path, convert)}"
    )


def quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a config.json says of how weights are quantised, on its top or in a config inside it; None for nothing."""
    for values in (config, *(each for each in config.values() if isinstance(each, dict))):
        found = values.get(QUANTISATION_KEY)
        if found is not None:
            return found if isinstance(found, dict) else {"quant_method": found}
    return None


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a config.json promises whole numbers of few bits as `quantize` writes them, which transformers loads."""
    found = config.get(QUANTISATION_KEY)
    packed = isinstance(found, dict) and found.get("quant_method") == "compressed-tensors"
    return packed and found is not None and found.get("format") == "pack-quantized"


def is_plain_fp8(config: Mapping[str, Any]) -> bool:
    """Whether a config.json promises float8 weights with a scale for each tensor, row or block."""
    found = config.get(QUANTISATION_KEY)
    if not isinstance(found, dict):
        return False
    if found.get("quant_method") == "compressed-tensors":
        own = _weights(found)
        plain = bool(own) and all(each.get("type") == "float" for each in own)
        other = found.get("transform_config") or found.get("sparsity_config")
        return found.get("format") == "float-quantized" and plain and not other
    return found.get("quant_method") == "fp8"


def _weights(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What each group of compressed-tensors says of its weights; nothing of what is no such group."""
    groups = found.get("config_groups")
    own = (
        [each.get("weights") for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    )
    return [each for each in own if isinstance(each, dict)]


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that one scale of a plain fp8 checkpoint stands for; None where the config names none."""
    found = config[QUANTISATION_KEY]
    size = found.get("weight_block_size")
    for each in _weights(found):
        size = size or each.get("block_structure")
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(each, int) and each > 0 for each in size)):
        return None
    return size[0], size[1]


def scale_block(
    shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Rows and columns of a matrix that one of its scales stands for.

    Args:
        shape: of the tensor; what stands before its last two axes is repeated in its scales.
        scale: shape of its scales.
        block: what the config names.

    Returns:
        None where the scales fit neither the tensor, nor its rows, nor the config's blocks.
    """
    if math.prod(scale) == 1:
        return (max(1, shape[-2]), max(1, shape[-1])) if len(shape) == 2 else None
    if len(shape) < 2:
        return None
    if scale == (*shape[:-1], 1):
        return 1, max(1, shape[-1])
    if block is None:
        return None
    rows, columns = block
    return block if scale == (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)) else None


def drop_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the same model with plain weights."""
    return {key: value for key, value in config.items() if key != QUANTISATION_KEY}


def refuse_by_config(path: Path) -> None:
    """`refuse_quantised` for a folder that may have no readable config.json: what else is wrong is found elsewhere."""
    try:
        config = read_json_object(path / "config.json")
    except UserError:
        return
    refuse_quantised(path, config)


def _of_bitsandbytes(found: Mapping[str, Any]) -> bool:
    return bool(found.get("load_in_4bit") or found.get("load_in_8bit"))


def class_name(config: Mapping[str, Any]) -> str:
    """The transformers class that a config.json names, for a command to copy."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isidentifier() else "AutoModelForCausalLM"


def _remedy(folder: Path, convert: str | None) -> str:
    """What to do instead: the checkpoint that a model card names, or the command, or neither."""
    base = _base_model(folder)
    if base is not None:
        return f"its README.md names the checkpoint it was made from: `hf download {base}`"
    if convert is None:
        return "give the checkpoint it was made from"
    return f"give the checkpoint it was made from, or make a plain copy: {convert}"


def _base_model(folder: Path) -> str | None:
    """The Hub id that the card of a folder says it was made from."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    _, *parts = text.split("---\n", 2) if text.startswith("---\n") else ("",)
    found = _BASE_MODEL.search(parts[0]) if parts else None
    return found[1] if found else None
