"""Parity: does a folder load whole into stock transformers, and do two models compute the same."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.evaluation.batches import batches, check_same_vocabulary, check_windows, logits
from ckpt_prune.evaluation.device_map import device_map
from ckpt_prune.evaluation.whole_model import LoadReport, load_reported


def stock_load_report(folder: Path, auto: str | None = None) -> LoadReport:
    """Load a checkpoint folder, single-file or sharded, with stock transformers and say what did not fit.

    The whole model is in memory while this runs, in the checkpoint's own dtype, on CPU, or spread over devices
    (`placing.spread`).

    Args:
        folder: the checkpoint.
        auto: the Auto class to load it with; that of the architecture in config.json by default.

    Raises:
        UserError: transformers cannot load the folder at all.
    """
    return load_reported(folder, auto=auto, places=device_map())[1]


@torch.inference_mode()
def logits_difference(
    a: PreTrainedModel, b: PreTrainedModel, windows: Tensor, *, batch_size: int | None = None, what: str = "parity"
) -> float:
    """Largest absolute difference of the two models' logits over all positions of the windows, taken in float32.

    NaN if either model's logits are. Both models are put in evaluation mode.

    Args:
        a: A causal language model.
        b: Another, with a vocabulary of the same size; it may be on another device.
        windows: int64 token ids, shape (windows, window).
        batch_size: Windows in one forward pass; None takes as many as fit `default_batch_size`.
        what: Said on the progress bar.

    Raises:
        UserError: The models' vocabularies differ in size, or a window does not fit a model.
    """
    check_same_vocabulary(a, b)
    for model in (a, b):
        check_windows(model, windows)
        model.eval()
    largest = torch.zeros((), device=a.device)
    for batch in batches(a, windows, batch_size=batch_size, what=what):
        ours, theirs = logits(a, batch), logits(b, batch).to(batch.device)
        largest = torch.maximum(largest, (ours.float() - theirs.float()).abs().max())
    return largest.item()
