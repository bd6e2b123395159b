"""`ckpt_prune.load`."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ckpt_prune.api.function import user_errors
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.model.containers.remote import remote_class


@user_errors()
def load(
    path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | str | None = None
) -> PreTrainedModel:
    """Load a checkpoint that this tool wrote, a stock one or one with blocks of different widths, into memory.

    Code in the folder is never run: a checkpoint with remote code is built by the same implementation inside this
    package (`ckpt_prune.modeling_pruned`). The parameters keep the checkpoint's dtype unless another is given.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; give a checkpoint folder")
    remote_class(read_json_object(folder / "config.json"), folder)
    return load_model(folder, device=device, dtype=dtype or "auto")
