"""Absorbing what was solved of the attention logits into the projections of queries and keys."""

import torch
from torch import Tensor


def split_factors(M: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of I + M that q and k absorb: U Σ^½ and V Σ^½ with I + M = U Σ Vᵀ (CORP eq. 16).

    Args:
        M: (H, d', d').

    Returns:
        left and right, (H, d', d') float64 each, with I + M = left rightᵀ.
    """
    U, values, Vt = torch.linalg.svd(torch.eye(M.shape[-1], dtype=torch.float64, device=M.device) + M.double())
    root = values.sqrt()[:, None, :]
    return U * root, Vt.mT * root


def selection(kept: Tensor, dims: int) -> Tensor:
    """The columns of the identity that keep some of `dims` dimensions, (H, d, d') float64, `kept` being (H, d')."""
    return torch.nn.functional.one_hot(kept, dims).double().mT


def mixed(M: Tensor, kept: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """P and Q, (H, d, d') each, whose logits are Q_S (I + M) K_Sᵀ.

    Args:
        M: (H, d', d').
        kept: S of each head, (H, d') int64.
        dims: d.
    """
    chosen = selection(kept, dims)
    left, right = split_factors(M)
    return chosen @ left, chosen @ right


def absorb(
    query: Tensor, key: Tensor, query_bias: Tensor | None, key_bias: Tensor | None, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The narrow projections that give Pᵀq and Qᵀk, head by head. The scale of the softmax is left to the caller.

    Args:
        query: W_q, (H d, hidden), any floating dtype.
        key: W_k, (H d, hidden).
        query_bias: (H d,), or None.
        key_bias: (H d,), or None.
        left: P, (H, d, d').
        right: Q, (H, d, d').

    Returns:
        W_q and W_k (H d', hidden) and their biases (H d',), float64. A bias that was None is None.
    """

    def absorbed(rows: Tensor, factor: Tensor) -> Tensor:
        return (factor.mT @ rows.double().view(len(factor), -1, rows.shape[1])).flatten(0, 1)

    def absorbed_bias(bias: Tensor | None, factor: Tensor) -> Tensor | None:
        return None if bias is None else absorbed(bias[:, None], factor).squeeze(1)

    return (
        absorbed(query, left),
        absorbed(key, right),
        absorbed_bias(query_bias, left),
        absorbed_bias(key_bias, right),
    )
