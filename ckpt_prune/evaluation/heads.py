"""What two models with a head on an encoder make of the same texts: classes of texts or tokens, or ends of answers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.calibration.readout import kl_divergence, read_whole, two_classes
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.evaluation.batches import batches, check_windows
from ckpt_prune.evaluation.correlation import rank_correlation
from ckpt_prune.evaluation.sentences import FEWEST


@dataclass(frozen=True)
class HeadComparison:
    """A model's predictions beside a reference's; of a head that gives one number for a text, their order."""

    kl: float | None
    """Mean over predictions of KL(reference ‖ model), nats, both ends of an answer together; None of single numbers."""
    agreement: float | None
    """Share of the predictions where both put the same class (or place) first, 0 to 1. None of single numbers."""
    rank_correlation: float | None
    """Spearman's, of the two models' numbers for all texts (a reranker's); None where there are classes."""
    predictions: int
    windows: int
    window: int


@torch.inference_mode()
def compare_heads(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    windows: Tensor,
    *,
    per_token: bool = False,
    ranked: tuple[int, int | None] | None = None,
) -> HeadComparison:
    """Compare the logits of two models.

    Args:
        model: a classifier of texts or tokens, or one that finds answers; put in evaluation mode.
        reference: of the same kind, with as many classes.
        windows: int64 token ids, (N, T).
        per_token: whether predictions are of tokens. Logits without an axis of classes are then of two each.
        ranked: of a reranker by the logits of a causal language model, the tokens that make its number
            (`modules.ranked_tokens`).

    Raises:
        UserError: a window does not suit a model, the heads differ in their classes, too few texts have single numbers
            to be put in order, or a logit is not a number.
    """
    for each in (model, reference):
        check_windows(each, windows)
        read_whole(each)
        each.eval()
    kl = agreeing = 0.0
    predictions = 0
    numbers: tuple[list[Tensor], list[Tensor]] = ([], [])
    for batch in batches(model, windows, batch_size=None, what="comparing"):
        pairs = zip(_logits(model, batch, ranked), _logits(reference, batch, ranked), strict=True)
        for ours, theirs in pairs:
            if ours.shape != theirs.shape:
                raise UserError("the two heads differ in their classes: what they give cannot be compared")
            if not (all_finite(ours) and all_finite(theirs)):
                raise UserError("the model's logits are not numbers (NaN): its weights are damaged or overflow here")
            if per_token and ours.dim() == 2:
                ours, theirs = two_classes(ours), two_classes(theirs)
            if ours.shape[-1] == 1 and ours.dim() == 2:
                for kept, each in zip(numbers, (ours, theirs), strict=True):
                    kept.append(each[:, 0])
                continue
            kl += kl_divergence(theirs, ours)
            same = (ours.argmax(-1) == theirs.argmax(-1)).double()
            agreeing += same.sum().item()
            predictions += same.numel()
    count, window = windows.shape
    if not numbers[0]:
        return HeadComparison(kl / count, agreeing / predictions, None, predictions, count, window)
    if count < FEWEST:
        raise UserError(f"{count} windows have no order to speak of: {FEWEST} are needed; give more text")
    order = rank_correlation(torch.cat(numbers[0]), torch.cat(numbers[1]))
    return HeadComparison(None, None, order, count, count, window)


def _logits(model: PreTrainedModel, batch: Tensor, ranked: tuple[int, int | None] | None) -> Iterator[Tensor]:
    """Every output that has logits, in the model's order, or the number that a reranker makes of it; float32 on CPU."""
    found = model(input_ids=batch.to(model.device))
    for name, value in found.items():
        if name.endswith("logits"):
            logits = value.float().cpu()
            yield logits if ranked is None else _number(logits[:, -1], *ranked)


def _number(logits: Tensor, true: int, false: int | None) -> Tensor:
    """What a reranker by logits says of texts, (B, 1), from those of their last tokens, (B, vocabulary)."""
    return logits[:, [true]] - (0 if false is None else logits[:, [false]])
