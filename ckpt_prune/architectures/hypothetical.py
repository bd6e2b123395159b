"""A checkpoint that is only a config: every tensor known by name, shape and dtype, none of them there."""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.architectures.family import family_of
from ckpt_prune.architectures.skeleton import Names, build_skeleton, parse_config, tied_names
from ckpt_prune.checkpoint.reading import CONFIG, SINGLE, Checkpoint
from ckpt_prune.checkpoint.shard import TensorInfo
from ckpt_prune.errors import UserError


def is_config_only(folder: Path) -> bool:
    """Whether a folder has a config.json and no file of weights."""
    if not (folder / CONFIG).is_file():
        return False
    return not any(path.suffix in {".safetensors", ".bin", ".pt", ".pth"} for path in folder.iterdir())


def checkpoint_of_config(folder: Path) -> Checkpoint:
    """The checkpoint a config describes, for counting; it cannot be read.

    Raises:
        UserError: the config cannot be read, or is of no known family.
    """
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} is not readable JSON") from error
    skeleton = build_skeleton(parse_config(config), family_of(config).architecture)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    tied = tied_names(skeleton)
    tensors = {
        name: TensorInfo(name, dtype, shape, SINGLE, nbytes=prod(shape) * dtype.itemsize, offset=0)
        for name, shape in Names(skeleton).shapes.items()
        if name not in tied
    }
    return Checkpoint(path=folder, config=config, tensors=tensors, files=(SINGLE,), sharded=False, metadata={})
