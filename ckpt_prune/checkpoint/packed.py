"""Weights of few bits in the pack-quantized form of compressed-tensors, as `quantize` writes them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ckpt_prune.checkpoint.quantised import QUANTISATION_KEY, weight_settings
from ckpt_prune.checkpoint.shard import Scaled, TensorInfo, unpack_words
from ckpt_prune.common.errors import UserError

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"


def unpack_weights(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with plain weights in place of packed ones, in the type of their scales (as transformers)."""
    modules = [name.removesuffix(PACKED) for name in tensors if name.endswith(f".{PACKED}")]
    if not modules:
        return tensors
    ends = (f".{PACKED}", f".{SCALE}", f".{SHAPE}")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    for module in modules:
        words, scales = tensors[module + PACKED], tensors[module + SCALE]
        rows, columns = tensors[module + SHAPE].tolist()
        codes = unpack_words(words, 8 if words.shape[1] == -(-columns // 4) else 4, columns)
        grouped = codes.to(scales.dtype).reshape(rows, scales.shape[1], -1)
        plain[f"{module}weight"] = (grouped * scales[..., None]).reshape(rows, columns)
    return plain


def shape_infos(tensors: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    """Return the tensors that hold shapes of weights: the last word of a row may be filled up."""
    return [info for name, info in tensors.items() if name.endswith(f".{SHAPE}") and info.shape == (2,)]


def attach_groups(
    path: Path, tensors: dict[str, TensorInfo], config: Mapping[str, Any], shapes: Mapping[str, Tensor]
) -> dict[str, TensorInfo]:
    """Return the tensors of a packed checkpoint as they are read: plain weights, in the type of their scales.

    Args:
        path: of the folder.
        tensors: by name, as the headers have them.
        config: of the folder.
        shapes: what `shape_infos` hold.

    Raises:
        UserError: weights are packed in another way than `quantize` packs them, or scales do not fit them.
    """
    settings = weight_settings(config[QUANTISATION_KEY])
    possible_bits = [bits for bits in (4, 8) if any(each.get("num_bits") == bits for each in settings)]
    ends = (f".{PACKED}", f".{SCALE}", f".{SHAPE}")
    odd = [name for name in tensors if ".weight_" in name and not name.endswith(ends)]
    others = [each for each in settings if each.get("num_bits") not in (4, 8) or each.get("symmetric") is not True]
    if not possible_bits or odd or others:
        bits = others[0].get("num_bits") if others else None
        why = odd[0] if odd else f"its quantization_config has weights of {bits} bits"
        raise UserError(f"{path} is packed in another way than `ckpt-prune quantize` packs ({why})")
    read: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if not name.endswith(ends):
            read[name] = info
        elif name.endswith(f".{PACKED}"):
            module = name.removesuffix(PACKED)
            scale = tensors.get(module + SCALE)
            rows, columns = shapes[module + SHAPE].tolist() if module + SHAPE in shapes else (0, 0)
            # Each weight tells its bits: by its words, and by the config where few columns leave both open.
            bits = next((each for each in possible_bits if info.shape == (rows, -(-columns * each // 32))), 0)
            fits = bits > 0 and columns > 0
            groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 and scale.shape[0] == rows else 0
            if not fits or scale is None or not groups or columns % groups:
                raise UserError(f"{path}: {name} has no shape or scales that fit it; download it again")
            group = Scaled(info.dtype, scale, (1, columns // groups), bits)
            plain = f"{module}weight"
            read[plain] = replace(info, name=plain, dtype=scale.dtype, shape=(rows, columns), scaled=group)
    return read
