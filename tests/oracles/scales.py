"""Scales of linear modules' outputs and inputs, on whole models in float64: the divergence, and its gradient."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""Parameter of the model, (d_out, d_in) → factors of its rows and of its columns."""


def outputs(model: PreTrainedModel, batch: Mapping[str, Tensor], pairs: Pairs) -> list[Tensor]:
    """Return logits, or last hidden states, of the model with its weights scaled."""
    parameters = dict(model.named_parameters())
    changed = {name: rows[:, None] * parameters[name] * columns[None, :] for name, (rows, columns) in pairs.items()}
    result = functional_call(model, changed, kwargs=dict(batch))
    return [value for name, value in result.items() if name.endswith("logits")] or [result.last_hidden_state]


def divergence(theirs: Sequence[Tensor], ours: Sequence[Tensor], *, logits: bool) -> Tensor:
    """Mean over samples of the mean over positions of Σ p (log p − log q), summed over several logits."""
    total = torch.zeros((), dtype=torch.float64)
    for p, q in zip(theirs, ours, strict=True):
        for one, other in zip(p, q, strict=True):
            if logits:
                one, other = (output.reshape(-1, output.shape[-1]) for output in (one, other))
                log_p, log_q = one.log_softmax(-1), other.log_softmax(-1)
                total = total + (log_p.exp() * (log_p - log_q)).sum(-1).mean() / len(p)
            else:
                total = total + (other - one).square().sum() / one.square().sum() / len(p)
    return total
