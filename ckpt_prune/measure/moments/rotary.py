"""Moments of one layer's rotary pairs, which scores and compensation of dropped pairs need; they add.

See compensation/README.md, section 9.

After rotation by position, pair p gives z_p(t, s) = q_p(t)·k_p(s) to the logit of token t at token s, and
z'_p(t, s) = (J q_p(t))·k_p(s) if the query is turned by 90° more. Everything that is fitted to logits here is linear
in these. So the Gram of all z and z', summed over all pairs of tokens of a sample, is all it needs. That Gram is
made of 2 x 2 blocks of the sample's Grams of q and k, whose products are summed over samples.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.logits import choose_logit_type
from ckpt_prune.measure.moments.sums import Sums


@dataclass(frozen=True)
class RotaryMoments(Sums):
    """Moments of the rotary pairs of N samples in one layer.

    Attributes:
        samples: N.
        tokens: over all samples.
        gram: of every query head Σ z zᵀ, z having z_p and z'_p of pair p at 2 p and 2 p + 1, (H, 2 P, 2 P) float64.
    """

    samples: int
    tokens: int
    gram: Tensor

    @classmethod
    def zeros(cls, heads: int, pairs: int, *, device: torch.device | str = "cpu") -> Self:
        return cls(0, 0, torch.zeros(heads, 2 * pairs, 2 * pairs, dtype=torch.float64, device=device))

    @property
    def heads(self) -> int:
        return self.gram.shape[0]

    @property
    def pairs(self) -> int:
        return self.gram.shape[1] // 2

    def accumulate(self, queries: Tensor, keys: Tensor) -> Self:
        """Add a batch of samples: queries (B, H, T, 2, P) and keys (B, KV heads, T, 2, P) after rotation.

        The axis of two holds the first and second dimensions of the pairs.
        """
        batch, heads, tokens, _, pairs = queries.shape
        rows = (states.detach().flatten(3).transpose(1, 2).flatten(2).flatten(0, 1) for states in (queries, keys))
        dtype = choose_logit_type(*rows)
        A, B = _grams(queries, dtype), _grams(keys, dtype).repeat_interleave(heads // keys.shape[1], 1)
        # J is (x, y) ↦ (−y, x): of the turned query, the first dimension is the second one's opposite.
        turned = torch.stack([-A[:, :, 1], A[:, :, 0]], 2)
        both = torch.stack([-turned[:, :, :, :, 1], turned[:, :, :, :, 0]], 4)
        other = torch.stack([-A[:, :, :, :, 1], A[:, :, :, :, 0]], 4)
        product = "bhipjq,bhipjq->hpq"
        blocks = torch.stack(
            [
                torch.stack([torch.einsum(product, X, B) for X in row_of_blocks], 2)
                for row_of_blocks in ([A, other], [turned, both])
            ],
            2,
        )
        # (H, P, which of q, which of q, P) in the order of z.
        gram = blocks.permute(0, 1, 2, 4, 3).reshape(heads, 2 * pairs, 2 * pairs)
        return type(self)(self.samples + batch, self.tokens + batch * tokens, self.gram + gram)

    @property
    def is_finite(self) -> bool:
        return all_finite(self.gram)


def _grams(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Σ_t x xᵀ of each sample and head, (B, heads, 2, P, 2, P) float64, from (B, heads, T, 2, P)."""
    flat = states.detach().to(dtype).flatten(-2)
    pair_axes = states.shape[-2:]
    return (flat.mT @ flat).double().view(*states.shape[:2], *pair_axes, *pair_axes)
