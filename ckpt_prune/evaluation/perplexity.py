"""Perplexity of a model on windows of tokens, and its divergence from a reference (evaluation/README.md, section 1)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import batches, check_same_vocabulary, check_windows, logits

CHUNK_BYTES = 64 * 2**20
"""Log-probabilities are worked out for so many bytes of positions at a time, in float32."""


@dataclass(frozen=True)
class Score:
    """What a model makes of a text. A perplexity means nothing without its window."""

    perplexity: float
    """exp(nll)."""
    nll: float
    """Mean negative log-likelihood, nats per scored token."""
    tokens: int
    """Tokens scored: windows × (window − 1), the first token of a window being unscored."""
    window: int
    """Tokens in a window."""
    windows: int
    """Windows read."""


@dataclass(frozen=True)
class TokenComparison:
    """A model beside a reference on the same windows."""

    score: Score
    reference_score: Score
    kl: float
    """Mean over the scored positions of KL(reference ‖ model) of the next-token distributions, nats."""
    top1_agreement: float
    """Share of the scored positions where both hold the same token likeliest, 0 to 1."""


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel, windows: Tensor, *, batch_size: int | None = None, what: str = "perplexity"
) -> Score:
    """Measure perplexity: exp of the mean over every token but the first of each window.

    The model is put in evaluation mode.

    Args:
        model: Any causal language model.
        windows: int64 token ids, shape (windows, window).
        batch_size: Windows in one forward pass; None takes as many as fit `default_batch_size`.
        what: Said on the progress bar.

    Raises:
        UserError: The window is longer than the model's context, a token id is outside its vocabulary, or a logit
            is not a number.
    """
    check_windows(model, windows)
    model.eval()
    total = 0.0
    for batch in batches(model, windows, batch_size=batch_size, what=what):
        for predicted, targets in _scored(logits(model, batch), batch):
            total += _nll(predicted, targets)
    return _score(total, windows)


@torch.inference_mode()
def compare(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    windows: Tensor,
    *,
    batch_size: int | None = None,
    what: str = "comparing",
) -> TokenComparison:
    """Measure both perplexities, KL(reference ‖ model) and top-1 agreement in one pass over the windows.

    Arguments are those of `perplexity`; the two models may be on different devices.

    Raises:
        UserError: As `perplexity`, or the vocabularies differ in size.
    """
    check_same_vocabulary(model, reference)
    for each in (model, reference):
        check_windows(each, windows)
        each.eval()
    total = reference_total = divergence = 0.0
    agreeing = 0
    for batch in batches(model, windows, batch_size=batch_size, what=what):
        pairs = zip(
            _scored(logits(model, batch), batch),
            _scored(logits(reference, batch).to(batch.device), batch),
            strict=True,
        )
        for (predicted, targets), (expected, _) in pairs:
            total += _nll(predicted, targets)
            reference_total += _nll(expected, targets)
            pointwise = functional.kl_div(predicted, expected, reduction="none", log_target=True)
            divergence += pointwise.sum(dtype=torch.float64).item()
            agreeing += int((predicted.argmax(-1) == expected.argmax(-1)).sum())
    score = _score(total, windows)
    return TokenComparison(score, _score(reference_total, windows), divergence / score.tokens, agreeing / score.tokens)


def _scored(values: Tensor, batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield float32 log-probabilities (positions, vocab) with the tokens (positions,) they should predict."""
    positions = max(1, CHUNK_BYTES // (values.shape[-1] * 4))
    for window, tokens in zip(values, batch, strict=True):
        for predicted, targets in zip(window[:-1].split(positions), tokens[1:].split(positions), strict=True):
            yield predicted.float().log_softmax(-1), targets


def _nll(predicted: Tensor, targets: Tensor) -> float:
    return functional.nll_loss(predicted, targets, reduction="none").sum(dtype=torch.float64).item()


def _score(total: float, windows: Tensor) -> Score:
    count, window = windows.shape
    tokens = count * (window - 1)
    nll = total / tokens
    if math.isnan(nll):
        raise UserError("the model's logits are not numbers (NaN): its weights are damaged or overflow in this dtype")
    return Score(math.exp(nll) if nll < 700 else math.inf, nll, tokens, window, count)
