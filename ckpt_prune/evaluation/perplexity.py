"""Perplexity of a model on windows of tokens, and its divergence from a reference (README.md, section 1)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_same_vocabulary, check_windows, iterate_windows
from ckpt_prune.evaluation.display import Columns, Figures

CHUNK_BYTES = 64 * 2**20
"""Log-probabilities are worked out for so many bytes of positions at a time, in float32."""


@dataclass(frozen=True)
class PerplexityScore(Figures):
    """Perplexity of a model on a text. It means nothing without its window.

    Attributes:
        perplexity: exp(nll).
        nll: mean negative log-likelihood, nats per scored token.
        tokens: that were scored: windows × (window − 1), because nothing predicts the first token of a window.
    """

    columns: ClassVar[Columns] = (
        ("perplexity", "perplexity", ".3f"),
        ("window", "window", "d"),
        ("tokens", "tokens", ","),
    )
    perplexity: float
    nll: float
    tokens: int
    window: int
    windows: int


@dataclass(frozen=True)
class TokenComparison:
    """A model and a reference on the same tokens, with a `PerplexityScore` or `masked.MaskedScore` each.

    Attributes:
        kl: mean over the scored tokens of KL(reference ‖ model), nats.
        top1_agreement: share of the scored tokens for which both find the same token likeliest, 0 to 1.
    """

    score: PerplexityScore
    reference_score: PerplexityScore
    kl: float
    top1_agreement: float


class PredictionSums:
    """Adds up how well one model or two predict tokens, and how far their predictions are apart."""

    def __init__(self) -> None:
        self.tokens, self.nll, self.right, self.kl, self.agreeing = 0, [0.0, 0.0], [0, 0], 0.0, 0

    def add(self, predictions: list[Tensor], targets: Tensor) -> None:
        """Add the models' log-probabilities, float32 (N, vocabulary), of targets, (N,)."""
        self.tokens += len(targets)
        for place, predicted in enumerate(predictions):
            nll = functional.nll_loss(predicted, targets, reduction="none")
            self.nll[place] += nll.sum(dtype=torch.float64).item()
            self.right[place] += int((predicted.argmax(-1) == targets).sum())
        if len(predictions) == 2:
            ours, theirs = predictions
            self.kl += (
                functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dtype=torch.float64).item()
            )
            self.agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())

    def perplexity(self, place: int) -> tuple[float, float]:
        """Return a model's perplexity, infinity if a float cannot hold it, and its mean negative log-likelihood."""
        nll = self.nll[place] / self.tokens
        if math.isnan(nll):
            raise UserError(
                "the model's logits are not numbers (NaN): its weights are damaged or overflow in this dtype"
            )
        return math.exp(nll) if nll < 700 else math.inf, nll


def perplexity(model: PreTrainedModel, windows: Tensor, *, what: str = "perplexity") -> PerplexityScore:
    """Measure perplexity on windows, int64 (windows, window): exp of the mean over every token but each window's first.

    Puts the model in evaluation mode.
    """
    return PerplexityScore(*_add_up([model], windows, what).perplexity(0), *_count(windows))


def compare(
    model: PreTrainedModel, reference: PreTrainedModel, windows: Tensor, *, what: str = "comparing"
) -> TokenComparison:
    """Measure both perplexities, KL(reference ‖ model) and top-1 agreement in one pass over the windows.

    The two models may be on different devices.
    """
    check_same_vocabulary(model, reference)
    sums = _add_up([model, reference], windows, what)
    score, reference_score = (PerplexityScore(*sums.perplexity(place), *_count(windows)) for place in range(2))
    return TokenComparison(score, reference_score, sums.kl / sums.tokens, sums.agreeing / sums.tokens)


@torch.inference_mode()
def _add_up(models: list[PreTrainedModel], windows: Tensor, what: str) -> PredictionSums:
    for model in models:
        check_windows(model, windows)
        model.eval()
    sums = PredictionSums()
    for batch in iterate_windows(models[0], windows, what=what):
        logits = [model(input_ids=batch.to(model.device), use_cache=False).logits.to(batch.device) for model in models]
        for predictions, targets in _split(logits, batch):
            sums.add(predictions, targets)
    return sums


def _split(logits: list[Tensor], batch: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield each model's float32 log-probabilities (positions, vocabulary), and the tokens that they should predict."""
    positions = max(1, CHUNK_BYTES // (logits[0].shape[-1] * 4))
    for row, tokens in enumerate(batch):
        for start in range(0, len(tokens) - 1, positions):
            targets = tokens[start + 1 : start + 1 + positions]
            yield [each[row, start : start + len(targets)].float().log_softmax(-1) for each in logits], targets


def _count(windows: Tensor) -> tuple[int, int, int]:
    """Return the scored tokens, the tokens in a window, and how many windows there are."""
    count, window = windows.shape
    return count * (window - 1), window, count
