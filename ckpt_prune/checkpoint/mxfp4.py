"""Checkpoints whose experts are stored in MXFP4, such as gpt-oss, which are read as bfloat16."""

from dataclasses import replace
from pathlib import Path

import torch

from ckpt_prune.checkpoint.shard import FP4_BLOCK, Scaled, TensorInfo
from ckpt_prune.common.errors import UserError

_BLOCKS, _SCALES = "_blocks", "_scales"
"""Endings that are added to a weight's name for its elements, and for their scales."""


def attach_fp4(path: Path, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint in MXFP4 as they are read: bfloat16, (experts, inputs, outputs).

    Raises:
        UserError: elements have no scales, or either has another shape or type.
    """
    read: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        plain = name.removesuffix(_BLOCKS)
        if plain == name:
            if not (name.endswith(_SCALES) and f"{name.removesuffix(_SCALES)}{_BLOCKS}" in tensors):
                read[name] = info
            continue
        scale = tensors.get(plain + _SCALES)
        wanted = None if scale is None else (scale.dtype, (*scale.shape, FP4_BLOCK // 2))
        if scale is None or wanted != (torch.uint8, info.shape) or info.dtype != torch.uint8:
            raise UserError(f"{path}: {name} has no scales ({plain}{_SCALES}) that fit it; download it again")
        *experts, columns, groups = scale.shape
        exponents = replace(scale, dtype=torch.float8_e8m0fnu)
        endings = _BLOCKS, _SCALES
        scaled = Scaled(info.dtype, exponents, (FP4_BLOCK, 1), None, endings, scale.dtype, fp4=True)
        shape = *experts, groups * FP4_BLOCK, columns
        read[plain] = replace(info, name=plain, dtype=torch.bfloat16, shape=shape, scaled=scaled)
    return read
