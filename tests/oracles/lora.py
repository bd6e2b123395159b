"""Low-rank adapters (Hu et al. 2022) trained by AdamW (Loshchilov and Hutter 2019), in float64, nothing cut into parts.

W' = W + (α / r) B A, where B begins at zero. Every step: the mean loss of a batch, all gradients scaled together to a
norm of 1 if theirs is larger, AdamW with its usual settings. An epoch counts by the loss of what would be stored: W'
with zeros where W has them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BETAS, EPSILON, DECAY, MOST_NORM, WARM_UP = (0.9, 0.999), 1e-8, 0.01, 1.0, 0.05
BESIDE = 1e-6
"""Stands beside a norm that divides, as torch documents it: it makes clipped gradients a little smaller."""
Weights = dict[str, Tensor]
Loss = Callable[[Weights, Sequence[int]], Tensor]
"""Mean loss of samples under these weights."""


@dataclass(frozen=True)
class Path:
    """Records training: what would be stored after each epoch, its loss on held-out samples, and norms of gradients."""

    weights: list[Weights]
    losses: list[float]
    norms: list[float]


def rate_at(step: int, steps: int, highest: float, cosine: bool) -> float:
    """Along half a cosine to zero, or constant; up in a line over the first twentieth of the steps."""
    climbed = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
    return climbed * (highest * math.cos(math.pi / 2 * step / steps) ** 2 if cosine else highest)


def train(
    weights: Weights,
    downs: Weights,
    scale: float,
    loss: Loss,
    batches: Sequence[Sequence[Sequence[int]]],
    held_out: Sequence[int],
    *,
    rate: float,
    cosine: bool,
) -> Path:
    """Train on these batches, epoch by epoch.

    Args:
        weights: W of every module, (out, in).
        downs: A of every module at the start, (r, in).
        scale: α / r.
        loss: differentiable in the weights.
        batches: epoch → batch → samples.
        held_out: samples on which epochs are judged.
    """
    names = sorted(weights)
    values = [downs[name].clone() for name in names]
    values += [torch.zeros(len(weights[name]), len(downs[name]), dtype=torch.float64) for name in names]
    first, second = ([torch.zeros_like(value) for value in values] for _ in range(2))
    steps, t, path = sum(map(len, batches)), 0, Path([], [], [])

    def merged() -> Weights:
        pairs = zip(names, values[: len(names)], values[len(names) :], strict=True)
        return {name: weights[name] + scale * (up @ down) for name, down, up in pairs}

    for epoch in batches:
        for batch in epoch:
            values = [value.detach().requires_grad_() for value in values]
            gradients = torch.autograd.grad(loss(merged(), batch), values)
            norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
            path.norms.append(norm)
            now = rate_at(t, steps, rate, cosine)
            t += 1
            for place, gradient in enumerate(gradients):
                g = gradient * min(1.0, MOST_NORM / (norm + BESIDE))
                first[place] = BETAS[0] * first[place] + (1 - BETAS[0]) * g
                second[place] = BETAS[1] * second[place] + (1 - BETAS[1]) * g**2
                m, v = first[place] / (1 - BETAS[0] ** t), second[place] / (1 - BETAS[1] ** t)
                value = values[place].detach()
                values[place] = value - now * (m / (v.sqrt() + EPSILON) + DECAY * value)
        stored = {name: torch.where(weights[name] == 0, 0, weight) for name, weight in merged().items()}
        path.weights.append(stored)
        path.losses.append(float(loss(stored, held_out)))
    return path
