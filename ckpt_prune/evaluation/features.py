"""How near the last hidden states of two base models are: there is no head that says what is right."""

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_finite, iterate_samples
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.measure.samples.samples import Samples, move_batch


@dataclass(frozen=True)
class FeatureComparison(Figures):
    """A base model's last hidden states beside a reference's.

    Attributes:
        cosine: mean over all tokens, −1 to 1.
        relative_error: Σ‖h′ − h‖² / Σ‖h‖² over all tokens, h the reference's.
    """

    columns = (("cosine", "cosine", ".4f"), ("relative error", "relative_error", ".4f"), ("tokens", "tokens", ","))
    remark = "last hidden states against those of {against}"
    cosine: float
    relative_error: float
    samples: int
    tokens: int


@torch.inference_mode()
def compare_features(model: PreTrainedModel, reference: PreTrainedModel, samples: Samples) -> FeatureComparison:
    """Compare last hidden states, (B, T, hidden), token by token."""
    cosine = error = energy = 0.0
    tokens = 0
    for _, batch in iterate_samples(samples, "comparing"):
        ours, theirs = (
            each.eval()(**move_batch(batch, each.device, each.dtype)).last_hidden_state.double().cpu()
            for each in (model, reference)
        )
        if ours.shape != theirs.shape:
            raise UserError("the two models differ in hidden size: their features cannot be compared")
        check_finite("model's features", ours, theirs)
        cosine += functional.cosine_similarity(ours, theirs, dim=-1).sum().item()
        error += (ours - theirs).square().sum().item()
        energy += theirs.square().sum().item()
        tokens += ours.shape[0] * ours.shape[1]
    return FeatureComparison(cosine / tokens, error / energy if energy else float(error > 0), len(samples), tokens)
