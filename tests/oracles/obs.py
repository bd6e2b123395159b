"""The structured optimal brain surgeon from its definition: every candidate refitted from scratch, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor


def columns(units: Sequence[int], per_unit: int) -> list[int]:
    return [unit * per_unit + offset for unit in units for offset in range(per_unit)]


def cost(W: Tensor, G: Tensor, strength: float, dropped: Sequence[int], per_unit: int = 1) -> float:
    """Least tr((W − Ŵ)(G + λI)(W − Ŵ)ᵀ) over Ŵ that is zero on the columns of the units `dropped`.

    The normal equations of the kept columns, solved anew; what remains is written as a change of them so that nothing
    is lost in W_K − Ŵ_K.
    """
    H = G + strength * torch.eye(len(G), dtype=torch.float64)
    D = columns(dropped, per_unit)
    K = [j for j in range(len(G)) if j not in set(D)]
    delta = torch.zeros_like(W)
    delta[:, D] = W[:, D]
    if K and D:
        delta[:, K] = -torch.linalg.solve(H[K][:, K], H[K][:, D] @ W[:, D].T).T
    return float(((delta @ H) * delta).sum())


def cheapest_next(W: Tensor, G: Tensor, strength: float, dropped: list[int], per_unit: int = 1) -> tuple[int, float]:
    """The unit to drop next, and J with it dropped."""
    remaining = [unit for unit in range(len(G) // per_unit) if unit not in dropped]
    costs = [cost(W, G, strength, [*dropped, unit], per_unit) for unit in remaining]
    best = min(range(len(remaining)), key=costs.__getitem__)
    return remaining[best], costs[best]


def greedy(W: Tensor, G: Tensor, strength: float, per_unit: int = 1) -> tuple[list[int], list[float]]:
    """Units in the order they go, and J after each."""
    order: list[int] = []
    costs = []
    for _ in range(len(G) // per_unit):
        unit, value = cheapest_next(W, G, strength, order, per_unit)
        order.append(unit)
        costs.append(value)
    return order, costs
