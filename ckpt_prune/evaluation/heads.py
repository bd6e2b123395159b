"""How far the predictions of two heads on an encoder are apart: classes of texts or tokens, or ends of answers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_finite, check_windows, iterate_windows
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.evaluation.metrics import rank_correlation
from ckpt_prune.measure.streams.readout import allow_several_texts, as_two_classes, kl_divergence

FEWEST_TEXTS = 3
"""Two have one pair, and no ranks."""


@dataclass(frozen=True)
class HeadComparison(Figures):
    """A model's predictions beside a reference's; if a head gives one number for a text, their order.

    Attributes:
        kl: mean over predictions of KL(reference ‖ model), nats, both ends of an answer together; None for numbers.
        agreement: share of the predictions for which both put the same class (or place) first; None for numbers.
        rank_correlation: Spearman's, of the two models' numbers for all texts; None for classes.
        predictions, windows, window: how many, and tokens in a window.
    """

    columns = (
        ("KL divergence", "kl", ".4f"),
        ("agreement", "agreement", ".1%"),
        ("rank correlation", "rank_correlation", ".4f"),
        ("window", "window", "d"),
        ("predictions", "predictions", ","),
    )
    remark = "predictions against those of {against}; nothing here says which are right"
    kl: float | None
    agreement: float | None
    rank_correlation: float | None
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
        per_token: predictions are of tokens. Logits without an axis of classes are then of two classes each.
        ranked: for a reranker by the logits of a causal language model, the tokens that make its number
            (`sentence_modules.read_ranked_tokens`).
    """
    for each in (model, reference):
        check_windows(each, windows)
        allow_several_texts(each)
        each.eval()
    kl = agreeing = 0.0
    predictions = 0
    numbers: tuple[list[Tensor], list[Tensor]] = ([], [])
    for batch in iterate_windows(model, windows, what="comparing"):
        for ours, theirs in zip(_run(model, batch, ranked), _run(reference, batch, ranked), strict=True):
            if ours.shape != theirs.shape:
                raise UserError("the two heads differ in their classes: what they give cannot be compared")
            check_finite("model's logits", ours, theirs)
            if per_token and ours.dim() == 2:
                ours, theirs = as_two_classes(ours), as_two_classes(theirs)
            if ours.shape[-1] == 1 and ours.dim() == 2:
                numbers[0].append(ours[:, 0])
                numbers[1].append(theirs[:, 0])
                continue
            kl += kl_divergence(theirs, ours)
            same = ours.argmax(-1) == theirs.argmax(-1)
            agreeing += int(same.sum())
            predictions += same.numel()
    count, window = windows.shape
    if not numbers[0]:
        return HeadComparison(kl / count, agreeing / predictions, None, predictions, count, window)
    if count < FEWEST_TEXTS:
        raise UserError(f"{count} windows have no order to speak of: {FEWEST_TEXTS} are needed; give more text")
    order = rank_correlation(torch.cat(numbers[0]), torch.cat(numbers[1]))
    return HeadComparison(None, None, order, count, count, window)


def _run(model: PreTrainedModel, batch: Tensor, ranked: tuple[int, int | None] | None) -> Iterator[Tensor]:
    """Yield every output that has logits, in the model's order, or the number that a reranker makes of it; float32."""
    for name, values in model(input_ids=batch.to(model.device)).items():
        if not name.endswith("logits"):
            continue
        logits = values.float().cpu()
        if ranked is not None:  # the number is made of the last token's logits
            true, false = ranked
            logits = logits[:, -1, [true]] - (0 if false is None else logits[:, -1, [false]])
        yield logits
