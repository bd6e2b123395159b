"""Scores of rotary pairs: higher = keep. Pure functions.

See scoring/README.md, section 4.

Each takes the rows of q and of k of every pair, (KV heads, P, query heads, 2, hidden) and (KV heads, P, 2, hidden), and
the moments of rotary pairs, and returns (KV heads, P) float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.scoring.costs import DropOrder
from ckpt_prune.scoring.obs import remove_greedily

DAMP = 1e-4
"""Strength that pairs are ranked with, a share of the Gram's mean diagonal. There are far more pairs of tokens than
unknowns, and a few rotary pairs have most of the energy: more would count the others as dear."""


def pair_energy(query: Tensor, key: Tensor, moments: RotaryMoments | None) -> Tensor:
    """E_b[Σ z_p²], what a pair alone gives the logits of all query heads that share its key."""
    if moments is None:
        raise ValueError("logit-energy needs moments")
    alone = moments.gram.diagonal(dim1=1, dim2=2)[:, ::2]
    return alone.reshape(len(key), -1, moments.pairs).sum(1) / moments.samples


def magnitude(query: Tensor, key: Tensor, moments: RotaryMoments | None) -> Tensor:
    """‖W_Q,p‖ ‖W_K,p‖, norms over both rows of a pair and all query heads. It needs no moments."""
    norms = [weight.double().square().flatten(2).sum(2).sqrt() for weight in (query, key)]
    return norms[0] * norms[1]


def surgeon(query: Tensor, key: Tensor, moments: RotaryMoments | None) -> Tensor:
    """Greedy removal, every pair that stays refitted by a complex factor in each query head (`scoring.obs`)."""
    if moments is None:
        raise ValueError("obs needs moments")
    return torch.stack(
        [
            remove_greedily(*_together(own), per_unit=2 * len(own), damp=DAMP).scores
            for own in _groups(moments, len(key))
        ]
    )


@dataclass(frozen=True)
class Score:
    """The function of a score, and the statistics that it needs."""

    function: Callable[[Tensor, Tensor, RotaryMoments | None], Tensor]
    needs_moments: bool = True
    needs_gram: bool = False


ROTARY_SCORES: dict[str, Score] = {
    "obs": Score(surgeon),
    "logit-energy": Score(pair_energy),
    "magnitude": Score(magnitude, needs_moments=False),
}


def refitted_errors(moments: RotaryMoments, scores: Tensor) -> Tensor:
    """What the logits lose with the pairs of least score gone and the others refitted: (H, P + 1) float64.

    Args:
        moments: of the layer.
        scores: (KV heads, P).
    """
    found = []
    for own, ranked in zip(_groups(moments, len(scores)), scores, strict=True):
        weight, gram = _together(own)
        order = DropOrder.of(weight, gram, ranked.argsort(stable=True), 2 * len(own), damp=DAMP)
        heads = torch.eye(len(own), dtype=torch.float64, device=gram.device)
        found += [order.costs(one[:, None] * one) for one in heads]
    return torch.stack(found)


def bare_errors(moments: RotaryMoments, scores: Tensor) -> Tensor:
    """The same with the others as they are; never decreasing, though pairs that go may make up for each other."""
    group = moments.heads // len(scores)
    order = scores.argsort(dim=-1, stable=True).repeat_interleave(group, 0)
    plain = moments.gram[:, ::2, ::2]
    rows = plain.gather(1, order[:, :, None].expand_as(plain))
    sums = rows.gather(2, order[:, None, :].expand_as(plain)).cumsum(1).cumsum(2).diagonal(dim1=1, dim2=2)
    return torch.cat([sums.new_zeros(len(sums), 1), sums], 1).cummax(1).values


def _groups(moments: RotaryMoments, groups: int) -> Tensor:
    """The Grams of the query heads of every KV head, (KV heads, query heads, 2 P, 2 P)."""
    return moments.gram.view(groups, -1, *moments.gram.shape[1:])


def _together(grams: Tensor) -> tuple[Tensor, Tensor]:
    """The query heads of one KV head as one projection, whose inputs are all z, pair by pair.

    Args:
        grams: (G, 2 P, 2 P).

    Returns:
        Weight (G, 2 P G), 1 at a head's own z, and Gram, of no products between heads: a unit of 2 G inputs is a pair.
    """
    group, width, _ = grams.shape
    gram = torch.zeros(width // 2, group, 2, width // 2, group, 2, dtype=torch.float64, device=grams.device)
    weight = torch.zeros(group, width // 2, group, 2, dtype=torch.float64, device=grams.device)
    for head, own in enumerate(grams):
        gram[:, head, :, :, head] = own.view(width // 2, 2, width // 2, 2)
        weight[head, :, head, 0] = 1
    return weight.flatten(1), gram.view(width * group, width * group)
