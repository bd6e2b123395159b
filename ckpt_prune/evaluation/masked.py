"""How well a masked language model fills in tokens, and its divergence from a reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_same_vocabulary, check_windows, iterate_windows
from ckpt_prune.evaluation.perplexity import PerplexityScore, PredictionSums, TokenComparison
from ckpt_prune.measure.samples.text import check_vocabulary

SHARE = 0.15
"""Share of the tokens that are masked, BERT's own in training."""


@dataclass(frozen=True)
class MaskedScore(PerplexityScore):
    """A score of masked tokens; `accuracy` is the share that the model finds likeliest."""

    columns = (
        ("masked perplexity", "perplexity", ".3f"),
        ("accuracy", "accuracy", ".2%"),
        ("window", "window", "d"),
        ("masked", "tokens", ","),
    )
    remark = f"{SHARE:.0%} of the tokens masked: not comparable with a causal perplexity"
    hidden = ("nll",)
    accuracy: float

    def data(self) -> dict[str, Any]:
        data = super().data()
        data["masked_perplexity"], data["masked"] = data.pop("perplexity"), data.pop("tokens")
        return data


def choose_masked(windows: Tensor, special: set[int], *, seed: int = 0) -> Tensor:
    """Choose positions to mask, bool like `windows` (N, T): `SHARE` of each window's ordinary tokens, at least one.

    Ids in `special` are never masked. The choice is the same on every machine.
    """
    ordinary = ~torch.isin(windows, torch.tensor(sorted(special), dtype=windows.dtype))
    if not bool(ordinary.any(1).all()):
        raise UserError("a window holds nothing but special tokens: there is nothing to mask")
    ranks = torch.rand(windows.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~ordinary, 2.0)
    order = ranks.argsort(1).argsort(1)
    return order < (ordinary.sum(1, keepdim=True) * SHARE).round().clamp_min(1)


@torch.inference_mode()
def fill_in(
    model: PreTrainedModel, windows: Tensor, masked: Tensor, mask_id: int, reference: PreTrainedModel | None = None
) -> MaskedScore | TokenComparison:
    """Measure a masked language model, alone or beside a reference with a vocabulary of the same size.

    Args:
        model: put in evaluation mode.
        windows: int64 token ids, (N, T).
        masked: positions to mask, bool (N, T).
        mask_id: the token that stands for a masked one.
        reference: another.
    """
    models = [model] if reference is None else [model, reference]
    if reference is not None:
        check_same_vocabulary(model, reference)
    for each in models:
        check_windows(each, windows)
        check_vocabulary(torch.tensor([mask_id]), each.config)
        each.eval()
    sums = PredictionSums()
    start = 0
    for batch in iterate_windows(model, windows, what="filling in"):
        chosen = masked[start : start + len(batch)].to(batch.device)
        start += len(batch)
        inputs = batch.masked_fill(chosen, mask_id)
        sums.add([_predict(each, inputs, chosen) for each in models], batch[chosen])
    count, window = windows.shape
    scores = [
        MaskedScore(*sums.perplexity(place), sums.tokens, window, count, sums.right[place] / sums.tokens)
        for place in range(len(models))
    ]
    if reference is None:
        return scores[0]
    return TokenComparison(scores[0], scores[1], sums.kl / sums.tokens, sums.agreeing / sums.tokens)


def _predict(model: PreTrainedModel, inputs: Tensor, chosen: Tensor) -> Tensor:
    """Return logits (masked tokens, vocabulary), on the device of the inputs."""
    output = model(input_ids=inputs.to(model.device))
    logits = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    predicted: Tensor = logits[chosen.to(logits.device)].to(inputs.device)
    return predicted
