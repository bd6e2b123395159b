"""Additive moments of one layer's rotary pairs: what scores and compensation of pairs that go need.

See compensation/README.md, section 9.

After rotation by position, pair p gives z_p(t, s) = q_p(t)·k_p(s) to the logit of token t at token s, and
z'_p(t, s) = (J q_p(t))·k_p(s) where the query is turned by 90° more. Everything that is fitted to logits here is linear
in these, so that the Gram of all z and z', summed over all pairs of tokens of a sample, is all it needs. That Gram is
made of 2 x 2 blocks of the sample's Grams of q and k, whose products are summed over samples.
"""

from typing import Self

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.logits import type_of_logits
from ckpt_prune.parallel.group import Group


class RotaryMoments:
    """Moments of the rotary pairs of N samples in one layer.

    Args:
        samples: N.
        tokens: over all samples.
        gram: of every query head Σ z zᵀ, z having z_p and z'_p of pair p at 2 p and 2 p + 1, (H, 2 P, 2 P) float64.
    """

    def __init__(self, samples: int, tokens: int, gram: Tensor) -> None:
        self.samples, self.tokens, self.gram = samples, tokens, gram

    @classmethod
    def zeros(cls, heads: int, pairs: int, *, device: torch.device | str = "cpu") -> Self:
        """The moments of no sample."""
        return cls(0, 0, torch.zeros(heads, 2 * pairs, 2 * pairs, dtype=torch.float64, device=device))

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.gram.shape[0]

    @property
    def pairs(self) -> int:
        """Rotary pairs of a head."""
        return self.gram.shape[1] // 2

    def accumulate(self, queries: Tensor, keys: Tensor) -> Self:
        """These moments and those of another batch of samples.

        Args:
            queries: after rotation, (B, H, T, 2, P): first and second dimensions of the pairs.
            keys: after rotation, (B, KV heads, T, 2, P).
        """
        batch, heads, tokens, _, pairs = queries.shape
        left, right = (each.detach().flatten(3).transpose(1, 2).flatten(2).flatten(0, 1) for each in (queries, keys))
        dtype = type_of_logits(left, right)
        A, B = _gram(queries, dtype), _gram(keys, dtype).repeat_interleave(heads // keys.shape[1], 1)
        # J is (x, y) ↦ (−y, x): of the turned query, the first dimension is the second one's opposite.
        turned = torch.stack([-A[:, :, 1], A[:, :, 0]], 2)
        both = torch.stack([-turned[:, :, :, :, 1], turned[:, :, :, :, 0]], 4)
        other = torch.stack([-A[:, :, :, :, 1], A[:, :, :, :, 0]], 4)
        product = "bhipjq,bhipjq->hpq"
        rows = [[A, other], [turned, both]]
        blocks = torch.stack([torch.stack([torch.einsum(product, X, B) for X in row], 2) for row in rows], 2)
        # (H, P, which of q, which of q, P) in the order of z.
        gram = blocks.permute(0, 1, 2, 4, 3).reshape(heads, 2 * pairs, 2 * pairs)
        return type(self)(self.samples + batch, self.tokens + batch * tokens, self.gram + gram)

    def __add__(self, other: "RotaryMoments") -> "RotaryMoments":
        """Moments of the samples of both."""
        return RotaryMoments(self.samples + other.samples, self.tokens + other.tokens, self.gram + other.gram)

    def __sub__(self, other: "RotaryMoments") -> "RotaryMoments":
        """Moments of these samples less those of some of them."""
        return RotaryMoments(self.samples - other.samples, self.tokens - other.tokens, self.gram - other.gram)

    def to(self, device: torch.device | str) -> "RotaryMoments":
        """The same moments on another device."""
        return RotaryMoments(self.samples, self.tokens, self.gram.to(device))

    def pooled(self, group: Group) -> "RotaryMoments":
        """Moments of the samples of all processes, at the first one."""
        samples, tokens = group.add(torch.tensor([self.samples, self.tokens])).tolist()
        return RotaryMoments(samples, tokens, group.add(self.gram))

    @property
    def finite(self) -> bool:
        """Whether no moment is NaN or Inf."""
        return all_finite(self.gram)


def _gram(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_t x xᵀ of each sample and head, (B, heads, 2, P, 2, P) float64, from (B, heads, T, 2, P)."""
    flat = states.detach().to(dtype).flatten(-2)
    own = states.shape[-2:]
    return (flat.mT @ flat).double().view(*states.shape[:2], *own, *own)
