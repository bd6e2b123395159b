"""Textbook perplexity and divergence: float64, one position at a time, each from its own prefix alone."""

import copy
import math

import torch
from torch import Tensor


def next_token_distributions(model, windows: Tensor) -> list[Tensor]:
    """For each window and each of its tokens but the first: float64 probabilities (vocab,) given what stands before."""
    exact = copy.deepcopy(model).double().eval()
    distributions = []
    with torch.no_grad():
        for window in windows:
            for position in range(1, len(window)):
                last = exact(input_ids=window[None, :position]).logits[0, -1]
                distributions.append(torch.exp(last) / torch.exp(last).sum())
    return distributions


def perplexity(model, windows: Tensor) -> float:
    targets = [int(token) for window in windows for token in window[1:]]
    distributions = next_token_distributions(model, windows)
    losses = [-math.log(p[target]) for p, target in zip(distributions, targets, strict=True)]
    return math.exp(math.fsum(losses) / len(losses))


def divergence(p: list[Tensor], q: list[Tensor]) -> float:
    """Mean over positions of KL(p ‖ q) in nats."""
    terms = [float((here * (here / there).log()).sum()) for here, there in zip(p, q, strict=True)]
    return math.fsum(terms) / len(terms)


def agreement(p: list[Tensor], q: list[Tensor]) -> float:
    """Share of positions with the same likeliest token."""
    same = [int(here.argmax()) == int(there.argmax()) for here, there in zip(p, q, strict=True)]
    return sum(same) / len(same)
