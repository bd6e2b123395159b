"""LLM-Pruner's importances from whole models: every gradient by autograd, in float64, sample by sample."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


def gradients(model: PreTrainedModel, windows: Tensor) -> list[dict[str, Tensor]]:
    """Gradients of transformers' own loss of each window, by parameter."""
    per_sample = []
    for window in windows:
        model.zero_grad()
        model(input_ids=window[None], labels=window[None]).loss.backward()
        per_sample.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    return per_sample


def importance(model: PreTrainedModel, windows: Tensor, parts: list[tuple[str, int, list[slice]]]) -> dict:
    """Importance of the units that lie on some parameters: (name, dimension, each unit's lines).

    Returns:
        Order → one number per unit.
    """
    weights = dict(model.named_parameters())
    grads = gradients(model, windows)
    orders = {order: torch.zeros(len(parts[0][2]), dtype=torch.float64) for order in ("first", "second")}
    for name, dim, units in parts:
        weight = weights[name].detach()
        linear = sum(grad[name] for grad in grads) * weight
        curved = linear - 0.5 * sum((grad[name] * weight) ** 2 for grad in grads)
        for order, change in (("first", linear), ("second", curved)):
            orders[order] += torch.tensor(
                [float(change[unit].abs().sum() if dim == 0 else change[:, unit].abs().sum()) for unit in units]
            )
    return orders
