"""Masks and the optimal brain surgeon from their definitions, weight by weight, in float64 (sparsity/README.md)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def magnitude(W: Tensor) -> Tensor:
    """|W_ij|."""
    return torch.tensor([[abs(float(w)) for w in row] for row in W], dtype=torch.float64)


def wanda(W: Tensor, X: Tensor) -> Tensor:
    """|W_ij| times the norm of input j over the tokens X (N, d_in)."""
    norms = [math.sqrt(sum(float(x) ** 2 for x in column)) for column in X.T]
    return torch.tensor([[abs(float(w)) * n for w, n in zip(row, norms, strict=True)] for row in W]).double()


def lowest(scores: list[float], count: int) -> set[int]:
    """Positions of the `count` lowest scores; of equal ones the later position is taken first."""
    return set(sorted(range(len(scores)), key=lambda i: (scores[i], -i))[:count])


def drop_in_rows(scores: Tensor, count: int) -> Tensor:
    """`count` go in every row: (d_out, d_in) bool, True = stays."""
    keep = torch.ones(scores.shape, dtype=torch.bool)
    for i, row in enumerate(scores.tolist()):
        for j in lowest(row, count):
            keep[i, j] = False
    return keep


def drop_in_matrix(scores: Tensor, count: int) -> Tensor:
    """`count` go anywhere."""
    keep = torch.ones(scores.shape, dtype=torch.bool)
    for position in lowest([s for row in scores.tolist() for s in row], count):
        keep[position // scores.shape[1], position % scores.shape[1]] = False
    return keep


def drop_in_groups(scores: Tensor, n: int, m: int) -> Tensor:
    """Keep n of every m columns of a row."""
    return torch.cat([drop_in_rows(part, m - n) for part in scores.split(m, 1)], 1)


def surgeon(row: Tensor, keep: Tensor, H: Tensor, start: int, stop: int) -> Tensor:
    """Visit columns start…stop−1 of a row (d_in,): where keep is False the weight goes, the unvisited make up for it.

    δ = −(w_q / [H_F⁻¹]_qq) [H_F⁻¹]_:,q with H_F over the columns not yet visited, q among them: the least increase of
    δ H δᵀ subject to w_q + δ_q = 0.
    """
    w = row.clone()
    for q in range(start, stop):
        if not keep[q]:
            inverse = torch.linalg.inv(H[q:, q:])
            w[q:] = w[q:] - (w[q] / inverse[0, 0]) * inverse[:, 0]
            w[q] = 0.0
    return w


def saliency(W: Tensor, H: Tensor, start: int, stop: int) -> Tensor:
    """w_q² / [H_F⁻¹]_qq of columns start…stop−1 with F = {q, …}: twice what dropping q alone would then cost."""
    columns = [W[:, q] ** 2 / torch.linalg.inv(H[q:, q:])[0, 0] for q in range(start, stop)]
    return torch.stack(columns, 1)


def sparsegpt(
    W: Tensor,
    H: Tensor,
    *,
    block: int,
    count: Callable[[int], int] | None = None,
    groups: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """SparseGPT on a Hessian already damped: (d_out, d_in) weight and mask, True = stays.

    Args:
        W: float64.
        H: float64, positive definite.
        block: columns whose mask is chosen together without groups.
        count: how many of so many weights go, without groups.
        groups: (n kept, of m), chosen when the visit reaches the group.
    """
    W, d_in = W.clone(), W.shape[1]
    keep = torch.ones(W.shape, dtype=torch.bool)
    step = groups[1] if groups else block
    for start in range(0, d_in, step):
        stop = min(start + step, d_in)
        scores = saliency(W, H, start, stop)
        keep[:, start:stop] = (
            drop_in_groups(scores, *groups) if groups else drop_in_matrix(scores, count(scores.numel()))
        )
        for i in range(len(W)):
            W[i] = surgeon(W[i], keep[i], H, start, stop)
    return W, keep
