"""Absorb what was solved of the attention logits into the projections of queries and keys."""

import torch
from torch import Tensor


def split_factors(M: Tensor) -> tuple[Tensor, Tensor]:
    """Split I + M into the factors that q and k absorb: U Σ^½ and V Σ^½ with I + M = U Σ Vᵀ (CORP eq. 16).

    M is (H, d', d'), and so are the factors, in float64: I + M = left rightᵀ.
    """
    U, values, Vt = torch.linalg.svd(torch.eye(M.shape[-1], dtype=torch.float64, device=M.device) + M.double())
    root = values.sqrt()[:, None, :]
    return U * root, Vt.mT * root


def selection_matrix(kept: Tensor, dims: int) -> Tensor:
    """Return the columns of the identity that keep some of `dims` dimensions, (H, d, d') float64; `kept` is (H, d')."""
    return torch.nn.functional.one_hot(kept, dims).double().mT


def mix_dimensions(M: Tensor, kept: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Return P and Q, (H, d, d') each, whose logits are Q_S (I + M) K_Sᵀ, for M (H, d', d') and S (H, d')."""
    chosen = selection_matrix(kept, dims)
    left, right = split_factors(M)
    return chosen @ left, chosen @ right


def absorb(
    query: Tensor, key: Tensor, query_bias: Tensor | None, key_bias: Tensor | None, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the narrow projections that give Pᵀq and Qᵀk, head by head; the caller scales the softmax.

    Args:
        query: W_q, (H d, hidden), any floating dtype.
        key: W_k, (H d, hidden).
        key_bias: (H d,), or None, as is the queries'.
        left: P, (H, d, d').
        right: Q, (H, d, d').

    Returns:
        W_q and W_k (H d', hidden) and their biases (H d',), float64. A bias that was None is None.
    """

    def absorb_rows(rows: Tensor, factor: Tensor) -> Tensor:
        return (factor.mT @ rows.double().view(len(factor), -1, rows.shape[1])).flatten(0, 1)

    def absorb_bias(bias: Tensor | None, factor: Tensor) -> Tensor | None:
        return None if bias is None else absorb_rows(bias[:, None], factor).squeeze(1)

    return (
        absorb_rows(query, left),
        absorb_rows(key, right),
        absorb_bias(query_bias, left),
        absorb_bias(key_bias, right),
    )
