"""Absorbing what logit compensation has solved into the projections of queries and keys (CORP eq. 17)."""

import torch
from torch import Tensor


def split_factors(M: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of I + M that q and k absorb: U Σ^½ and V Σ^½ with I + M = U Σ Vᵀ (CORP eq. 17).

    Args:
        M: (H, d', d').

    Returns:
        left and right, (H, d', d') float64 each, with I + M = left rightᵀ.
    """
    U, values, Vt = torch.linalg.svd(torch.eye(M.shape[-1], dtype=torch.float64, device=M.device) + M.double())
    root = values.sqrt()[:, None, :]
    return U * root, Vt.mT * root


def absorb_mixing(
    query: Tensor,
    key: Tensor,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    kept: Tensor,
    M: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The narrow projections whose logits are Q_S (I + M) K_Sᵀ. The scale of the softmax is left to the caller.

    Args:
        query: W_q, (H d, hidden), any floating dtype.
        key: W_k, (H d, hidden).
        query_bias: (H d,), or None.
        key_bias: (H d,), or None.
        kept: (H, d') int64.
        M: (H, d', d').

    Returns:
        W_q and W_k (H d', hidden) and their biases (H d',), float64. A bias that was None is None.
    """
    left, right = split_factors(M)

    def absorbed(rows: Tensor, factor: Tensor) -> Tensor:
        """`rows` (H d, n) of the kept dimensions, mixed within each head by `factor`ᵀ: (H d', n)."""
        by_head = rows.double().view(kept.shape[0], -1, rows.shape[1])
        return (factor.mT @ torch.stack([w[at] for w, at in zip(by_head, kept, strict=True)])).flatten(0, 1)

    def absorbed_bias(bias: Tensor | None, factor: Tensor) -> Tensor | None:
        return None if bias is None else absorbed(bias[:, None], factor).squeeze(1)

    return (
        absorbed(query, left),
        absorbed(key, right),
        absorbed_bias(query_bias, left),
        absorbed_bias(key_bias, right),
    )
