"""`ckpt_prune.load`."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ckpt_prune.api.function import user_errors
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.model.containers.remote import remote_class


@user_errors()
def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    two_four: bool = False,
) -> PreTrainedModel:
    """Load a checkpoint that this tool wrote, a stock one or one with blocks of different widths, into memory.

    Code in the folder is never run: a checkpoint with remote code is built by the same implementation inside this
    package (`ckpt_prune.modeling_pruned`). The parameters keep the checkpoint's dtype unless another is given.

    With `two_four` they are float16, and weights that hold 2:4 are packed for torch's semi-structured kernels, which
    run on NVIDIA GPUs of compute capability 8.0 or later. UserError says what lacks.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; give a checkpoint folder")
    remote_class(read_json_object(folder / "config.json"), folder)
    if not two_four:
        return load_model(folder, device=device, dtype=dtype or "auto")
    from ckpt_prune.benchmarking.runners import pack_two_four, why_not_two_four

    if dtype not in (None, torch.float16, "float16"):
        raise UserError(f"two_four: torch's kernels for 2:4 compute in float16, not in {dtype}")
    if (reason := why_not_two_four(Checkpoint.open(folder), str(device), "fp16")) is not None:
        raise UserError(f"two_four: {reason}")
    model = load_model(folder, device=device, dtype=torch.float16)
    pack_two_four(model)
    return model
