"""Plain fp8 checkpoints: float8 tensors with scales, which are read as bfloat16."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.checkpoint.quantised import QUANTISATION_KEY, weight_settings
from ckpt_prune.checkpoint.shard import Scaled, TensorInfo
from ckpt_prune.common.errors import UserError

_SCALES = ("_scale_inv", "_scale")
"""Endings that are added to a weight's name for its scales: in DeepSeek's form, and in compressed-tensors'."""
_ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".output_scale")
"""Scales for quantising activations, which a plain model does not use."""


def attach_scales(path: Path, tensors: dict[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors of a plain fp8 checkpoint as they are read: float8 ones as bfloat16, with their scales.

    Raises:
        UserError: a float8 tensor has no scales, or its scales fit neither it, its rows, nor the config's blocks.
    """
    block = _block_size(config)
    float8 = [name for name, info in tensors.items() if info.dtype.is_floating_point and info.dtype.itemsize == 1]
    scales = {
        name: _read_exponents(tensors[name + suffix], config)
        for name in float8
        for suffix in _SCALES
        if name + suffix in tensors
    }
    used = {scale.name for scale in scales.values()}
    read = dict(tensors)
    for name in float8:
        info = tensors[name]
        if name in used:  # scales may be float8 themselves
            continue
        if name not in scales:
            raise UserError(f"{path}: {name} is {info.dtype} and has no scales ({name}{_SCALES[0]}); download it again")
        scale = scales[name]
        shared = _shared_block(info.shape, scale.shape, block) if scale.dtype.is_floating_point else None
        if shared is None:
            raise UserError(
                f"{path}: {scale.name}, {scale.dtype} {list(scale.shape)}, are not scales of {name}, "
                f"{list(info.shape)}, by the blocks that config.json names ({block and list(block)})"
            )
        endings, stored_as = ("", scale.name.removeprefix(name)), tensors[scale.name].dtype
        scaled = Scaled(info.dtype, scale, shared, endings=endings, stored_as=stored_as)
        read[name] = replace(info, dtype=torch.bfloat16, scaled=scaled)
    return {name: info for name, info in read.items() if name not in used and not name.endswith(_ACTIVATION_SCALES)}


def _read_exponents(scale: TensorInfo, config: Mapping[str, Any]) -> TensorInfo:
    """Return scales as powers of two if they are stored as bytes and the config says that these are exponents."""
    is_bytes = scale.dtype == torch.uint8 and config[QUANTISATION_KEY].get("scale_fmt") == "ue8m0"
    return replace(scale, dtype=torch.float8_e8m0fnu) if is_bytes else scale


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale by the config; None if it names none."""
    settings = config[QUANTISATION_KEY]
    size = settings.get("weight_block_size")
    for weights in weight_settings(settings):
        size = size or weights.get("block_structure")
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(each, int) and each > 0 for each in size)):
        return None
    return size[0], size[1]


def _shared_block(
    shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the rows and columns of a tensor that share one of its scales.

    Args:
        shape: of the tensor; axes before the last two are repeated in its scales.
        scale: shape of its scales.
        block: rows and columns that the config names.

    Returns:
        None if the scales fit neither the tensor, nor its rows, nor the config's blocks.
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
