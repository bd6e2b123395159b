"""A checkpoint that is only a config: names, shapes and dtypes of tensors that do not exist."""

from math import prod
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.checkpoint.checkpoint import CONFIG, SINGLE, Checkpoint, check_config
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.quantised import drop_quantisation
from ckpt_prune.checkpoint.shard import TensorInfo
from ckpt_prune.model.composites import composite_names, is_composite
from ckpt_prune.model.skeleton import stock_names
from ckpt_prune.model.supported import declared_family


def is_config_only(folder: Path) -> bool:
    """Return whether a folder has a config.json and no file of weights."""
    if not (folder / CONFIG).is_file():
        return False
    return not any(path.suffix in {".safetensors", ".bin", ".pt", ".pth"} for path in folder.iterdir())


def config_of_folder(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder, as that of a model with plain weights."""
    return drop_quantisation(check_config(folder / CONFIG, read_json_object(folder / CONFIG)))


def checkpoint_of_config(folder: Path, config: dict[str, Any] | None = None) -> Checkpoint:
    """Return the checkpoint that a config describes, of a family or a composite, for counting; it cannot be read.

    Args:
        folder: with the config.json.
        config: in place of the one in the folder.
    """
    config = config_of_folder(folder) if config is None else config
    names = (
        composite_names(config) if is_composite(config) else stock_names(config, declared_family(config).architecture)
    )
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    tensors = {
        name: TensorInfo(name, dtype, shape, SINGLE, nbytes=prod(shape) * dtype.itemsize, offset=0)
        for name, shape in names.shapes.items()
        if name not in names.tied
    }
    return Checkpoint(path=folder, config=config, tensors=tensors, files=(SINGLE,), sharded=False, metadata={})
