"""How well a masked language model fills in tokens, and its divergence from a reference."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import batches, check_same_vocabulary, check_tokens, check_windows

SHARE = 0.15
"""Share of the tokens that are masked, BERT's own in training."""


@dataclass(frozen=True)
class MaskedScore:
    """What a model makes of the masked tokens of a text."""

    perplexity: float
    """exp of the mean negative log-likelihood of the masked tokens; not comparable with a causal perplexity."""
    accuracy: float
    """Share of the masked tokens that the model holds likeliest, 0 to 1."""
    tokens: int
    """Tokens masked and scored."""
    window: int
    """Tokens in a window."""
    windows: int
    """Windows read."""


@dataclass(frozen=True)
class TokenComparison:
    """A model beside a reference on the same masked tokens."""

    score: MaskedScore
    reference_score: MaskedScore
    kl: float
    """Mean over the masked tokens of KL(reference ‖ model), nats."""
    top1_agreement: float
    """Share of the masked tokens where both hold the same token likeliest, 0 to 1."""


def choose_masked(windows: Tensor, special: set[int], *, seed: int = 0) -> Tensor:
    """Positions to mask, bool like `windows` (N, T): `SHARE` of each window's ordinary tokens, at least one.

    Args:
        windows: int64 token ids.
        special: ids that are never masked.
        seed: of the choice; the same on every machine.

    Raises:
        UserError: a window holds nothing but special tokens.
    """
    ordinary = ~torch.isin(windows, torch.tensor(sorted(special), dtype=windows.dtype))
    if not bool(ordinary.any(1).all()):
        raise UserError("a window holds nothing but special tokens: there is nothing to mask")
    ranks = torch.rand(windows.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~ordinary, 2.0)
    order = ranks.argsort(1).argsort(1)
    return order < (ordinary.sum(1, keepdim=True) * SHARE).round().clamp_min(1)


@torch.inference_mode()
def fill_in(
    model: PreTrainedModel,
    windows: Tensor,
    masked: Tensor,
    mask_id: int,
    reference: PreTrainedModel | None = None,
    *,
    batch_size: int | None = None,
) -> MaskedScore | TokenComparison:
    """Measure a masked language model, alone or beside a reference.

    Args:
        model: any masked language model; put in evaluation mode.
        windows: int64 token ids, (N, T).
        masked: positions to mask, bool (N, T).
        mask_id: the token that stands for a masked one.
        reference: another, with a vocabulary of the same size.
        batch_size: windows in one forward pass; None takes as many as fit `default_batch_size`.

    Raises:
        UserError: the window is longer than the model's context, the vocabularies differ, or a logit is not a number.
    """
    models = [model] if reference is None else [model, reference]
    if reference is not None:
        check_same_vocabulary(model, reference)
    for each in models:
        check_windows(each, windows)
        check_tokens(each, torch.tensor([mask_id]))
        each.eval()
    nll, right, kl, agreeing = [0.0, 0.0], [0, 0], 0.0, 0
    start = 0
    for batch in batches(model, windows, batch_size=batch_size, what="filling in"):
        chosen = masked[start : start + len(batch)].to(batch.device)
        start += len(batch)
        targets = batch[chosen]
        predicted = list(_predictions(models, batch.masked_fill(chosen, mask_id), chosen))
        for i, each in enumerate(predicted):
            nll[i] += functional.nll_loss(each, targets, reduction="none").sum(dtype=torch.float64).item()
            right[i] += int((each.argmax(-1) == targets).sum())
        if reference is not None:
            ours, theirs = predicted
            pointwise = functional.kl_div(ours, theirs, reduction="none", log_target=True)
            kl += pointwise.sum(dtype=torch.float64).item()
            agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    tokens = int(masked.sum())
    scores = [_score(nll[i], right[i], tokens, windows) for i in range(len(models))]
    if reference is None:
        return scores[0]
    return TokenComparison(scores[0], scores[1], kl / tokens, agreeing / tokens)


def _predictions(models: list[PreTrainedModel], batch: Tensor, chosen: Tensor) -> Iterator[Tensor]:
    """Float32 log-probabilities (masked tokens, vocab) of each model."""
    for model in models:
        output = model(input_ids=batch.to(model.device))
        logits = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
        yield logits[chosen.to(logits.device)].to(batch.device).float().log_softmax(-1)


def _score(nll: float, right: int, tokens: int, windows: Tensor) -> MaskedScore:
    mean = nll / tokens
    if math.isnan(mean):
        raise UserError("the model's logits are not numbers (NaN): its weights are damaged or overflow in this dtype")
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return MaskedScore(perplexity, right / tokens, tokens, windows.shape[1], windows.shape[0])
