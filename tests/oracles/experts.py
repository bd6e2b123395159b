"""Experts of a block, one token and one expert at a time, in float64."""

import torch
from torch import Tensor


def gated_with_limits(rows: Tensor, alpha: float, limit: float) -> Tensor:
    """Gate and up in turns, both clamped: (up + 1) · gate · sigmoid(alpha · gate)."""
    made = torch.zeros(len(rows) // 2, dtype=torch.float64)
    for column in range(len(made)):
        gate, up = min(float(rows[2 * column]), limit), min(max(float(rows[2 * column + 1]), -limit), limit)
        made[column] = (up + 1) * gate / (1 + torch.exp(torch.tensor(-alpha * gate, dtype=torch.float64)))
    return made


def gated(rows: Tensor) -> Tensor:
    """The first half are gates: silu(gate) · up."""
    half = len(rows) // 2
    return torch.stack([rows[c] / (1 + torch.exp(-rows[c])) * rows[half + c] for c in range(half)])


def plain(rows: Tensor) -> Tensor:
    """relu² of each."""
    return torch.stack([max(row, row * 0) ** 2 for row in rows])


def sum_of_experts(tokens: Tensor, chosen: Tensor, weights: Tensor, parameters: dict[str, Tensor], inner) -> Tensor:
    """Return Σ over a token's experts of w · (down · inner(first · token + bias) + bias), (N, hidden) float64.

    Args:
        parameters: `first` (E, rows, hidden), `down` (E, hidden, columns), and perhaps `first_bias`, `down_bias`.
    """
    total = torch.zeros(tokens.shape, dtype=torch.float64)
    wide = {name: each.double() for name, each in parameters.items()}
    for token in range(len(tokens)):
        for place, expert in enumerate(chosen[token].tolist()):
            rows = wide["first"][expert] @ tokens[token].double()
            rows = rows + wide["first_bias"][expert] if "first_bias" in wide else rows
            made = wide["down"][expert] @ inner(rows)
            made = made + wide["down_bias"][expert] if "down_bias" in wide else made
            total[token] += float(weights[token, place]) * made
    return total
