"""How near the features of two base models are: what there is to compare where no head says what is right."""

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.calibration.samples import Samples, as_input
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_features, sample_batches


@dataclass(frozen=True)
class FeatureComparison:
    """A base model's last hidden states beside a reference's."""

    cosine: float
    """Mean cosine similarity over all tokens, −1 to 1."""
    relative_error: float
    """Σ‖h − h'‖² / Σ‖h‖² over all tokens, h the reference's."""
    samples: int
    tokens: int


@torch.inference_mode()
def compare_features(model: PreTrainedModel, reference: PreTrainedModel, samples: Samples) -> FeatureComparison:
    """Compare last hidden states, (B, T, hidden), token by token.

    Raises:
        UserError: the models differ in hidden size, or a feature is not a number.
    """
    cosine = error = energy = 0.0
    tokens = 0
    for _, batch in sample_batches(samples, "comparing"):
        ours, theirs = (
            each.eval()(**as_input(batch, each.device, each.dtype)).last_hidden_state.double().cpu()
            for each in (model, reference)
        )
        if ours.shape != theirs.shape:
            raise UserError("the two models differ in hidden size: their features cannot be compared")
        cosine += functional.cosine_similarity(ours, theirs, dim=-1).sum().item()
        error += (ours - theirs).square().sum().item()
        energy += theirs.square().sum().item()
        tokens += ours.shape[0] * ours.shape[1]
    check_features(finite=energy < float("inf") and error < float("inf"))
    return FeatureComparison(cosine / tokens, error / energy if energy else float(error > 0), len(samples), tokens)
