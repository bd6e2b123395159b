"""Scores of rotary pairs: higher = keep. Pure functions (scoring/README.md, section 4).

Each takes the rows of q and of k of every pair, (KV heads, P, query heads, 2, hidden) and (KV heads, P, 2, hidden). It
also takes the moments of rotary pairs, and returns (KV heads, P) float64. Scores are listed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_prune.scoring.scores import Score

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_prune.measure.moments.rotary import RotaryMoments

DAMP = 1e-4
"""Strength that pairs are ranked with, a share of the Gram's mean diagonal. There are far more pairs of tokens than
unknowns, and a few rotary pairs have most of the energy: with more damping, all other pairs would seem costly."""


def pair_energy(query: Tensor, key: Tensor, moments: RotaryMoments | None) -> Tensor:
    """E_b[Σ z_p²], what a pair alone gives the logits of all query heads that share its key."""
    if moments is None:
        raise ValueError("logit-energy needs moments")
    energies = moments.gram.diagonal(dim1=1, dim2=2)[:, ::2]
    return energies.reshape(len(key), -1, moments.pairs).sum(1) / moments.samples


def magnitude(query: Tensor, key: Tensor, moments: RotaryMoments | None) -> Tensor:
    """‖W_Q,p‖ ‖W_K,p‖, norms over both rows of a pair and all query heads. It needs no moments."""
    norms = [weight.double().square().flatten(2).sum(2).sqrt() for weight in (query, key)]
    return norms[0] * norms[1]


def surgeon(query: Tensor, key: Tensor, moments: RotaryMoments | None) -> Tensor:
    """Greedy removal, every pair that stays refitted by a complex factor in each query head (`scoring.obs`)."""
    import torch

    from ckpt_prune.scoring.obs import remove_greedily

    if moments is None:
        raise ValueError("obs needs moments")
    return torch.stack(
        [
            remove_greedily(*_join_heads(grams), per_unit=2 * len(grams), damp=DAMP).scores
            for grams in _by_kv_head(moments, len(key))
        ]
    )


ROTARY_SCORES: dict[str, Score] = {
    "obs": Score(surgeon),
    "logit-energy": Score(pair_energy),
    "magnitude": Score(magnitude, needs_moments=False),
}


def refitted_errors(moments: RotaryMoments, scores: Tensor) -> Tensor:
    """Errors of the logits with the pairs of least score dropped and the others refitted, (H, P + 1) float64.

    Args:
        moments: of the layer.
        scores: (KV heads, P).
    """
    import torch

    from ckpt_prune.scoring.costs import DropOrder

    errors = []
    for grams, ranked in zip(_by_kv_head(moments, len(scores)), scores, strict=True):
        weight, gram = _join_heads(grams)
        order = DropOrder.of(weight, gram, ranked.argsort(stable=True), 2 * len(grams), damp=DAMP)
        heads = torch.eye(len(grams), dtype=torch.float64, device=gram.device)
        errors += [order.costs(head[:, None] * head) for head in heads]
    return torch.stack(errors)


def bare_errors(moments: RotaryMoments, scores: Tensor) -> Tensor:
    """`refitted_errors` without a refit; never decreasing, though dropped pairs may cancel each other."""
    group = moments.heads // len(scores)
    order = scores.argsort(dim=-1, stable=True).repeat_interleave(group, 0)
    plain = moments.gram[:, ::2, ::2]
    rows = plain.gather(1, order[:, :, None].expand_as(plain))
    sums = rows.gather(2, order[:, None, :].expand_as(plain)).cumsum(1).cumsum(2).diagonal(dim1=1, dim2=2)
    errors = sums.new_zeros(len(sums), sums.shape[1] + 1)
    errors[:, 1:] = sums
    return errors.cummax(1).values


def _by_kv_head(moments: RotaryMoments, kv_heads: int) -> Tensor:
    return moments.gram.view(kv_heads, -1, *moments.gram.shape[1:])


def _join_heads(grams: Tensor) -> tuple[Tensor, Tensor]:
    """Write the query heads of one KV head as one projection, whose inputs are all z, pair by pair.

    Args:
        grams: of every query head, (G, 2 P, 2 P) float64.

    Returns:
        Weight (G, 2 P G), 1 at a head's own z, and Gram, zero between heads: a unit of 2 G inputs is a pair.
    """
    group, width, _ = grams.shape
    gram = grams.new_zeros(width // 2, group, 2, width // 2, group, 2).double()
    weight = grams.new_zeros(group, width // 2, group, 2).double()
    for head, own_gram in enumerate(grams):
        gram[:, head, :, :, head] = own_gram.view(width // 2, 2, width // 2, 2)
        weight[head, :, head, 0] = 1
    return weight.flatten(1), gram.view(width * group, width * group)
