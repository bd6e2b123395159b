"""Which units stay: counts from ratios, and FLAP's rankings over blocks. Pure functions.

See scoring/README.md, section 3.
"""

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_UP, Decimal

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.spaces import Counting, Site, SpaceName

_ROUNDING = {"floor": ROUND_FLOOR, "ceil": ROUND_CEILING, "nearest": ROUND_HALF_UP}


def units_kept(units: int, ratio: float, rounding: Counting, multiple_of: int = 1) -> int:
    """Return how many units stay when a share `ratio` of `units` goes; an error if none would.

    The product is taken in decimal: 0.07 of 100 is 7; in binary floats it is a little above, and `ceil` would give 8.
    The kept width is rounded up to a multiple of `multiple_of`, never past `units`; with `steps` to the nearest, never
    to none.
    """
    if rounding == "steps":
        steps = (Decimal(units) * (1 - Decimal(repr(ratio))) / multiple_of).to_integral_value(ROUND_HALF_UP)
        return min(units, max(1, int(steps)) * multiple_of)
    dropped = int((Decimal(units) * Decimal(repr(ratio))).to_integral_value(_ROUNDING[rounding]))
    kept = units - dropped
    if kept < 1:
        raise UserError(f"ratio {ratio:g} would drop all {units} units of a space: at least one must stay")
    return min(units, -(-kept // multiple_of) * multiple_of)


def unit_scores(columns: Tensor, per_unit: int) -> Tensor:
    """Return the score of each unit, the sum over its columns: (units * per_unit,) → (units,)."""
    return columns.view(-1, per_unit).sum(1)


def select(scores: Tensor, keep: int) -> Tensor:
    """Return indices of the `keep` highest scores, ascending, (keep,) int64. Of equal scores the lower index stays."""
    order = torch.sort(scores.cpu(), descending=True, stable=True).indices
    return order[:keep].sort().values


def select_in_heads(scores: Tensor, keep: int) -> Tensor:
    """Return rows of q and k with the `keep` highest scores of their head, ascending.

    Args:
        scores: of d dimensions in each of H heads, (H, d).

    Returns:
        (H keep,) int64. Dimension j of head h is row h d + j.
    """
    width = scores.shape[1]
    return torch.cat([select(head, keep) + index * width for index, head in enumerate(scores)])


def in_heads(kept: Tensor, heads: int, width: int) -> Tensor:
    """Return dimensions of each head, (H, d') int64, from kept rows of q and k (H d',)."""
    return kept.view(heads, -1) - torch.arange(heads, device=kept.device)[:, None] * width


def standardise(columns: Tensor, per_unit: int) -> Tensor:
    """Return FLAP's adaptive metric of each unit, (units * per_unit,) → (units,).

    Scores of a block's columns become z-scores, with the unbiased deviation, and are averaged over a unit's columns.
    If all columns of a block score the same, all units get zero.
    """
    deviation = columns.std() if columns.numel() > 1 else columns.new_zeros(())
    z = (columns - columns.mean()) / deviation if deviation > 0 else torch.zeros_like(columns)
    return z.view(-1, per_unit).mean(1)


def select_ranked(
    scores: Mapping[Site, Tensor], cost: Mapping[SpaceName, float], keep_cost: float, *, below_cut: bool = False
) -> dict[Site, Tensor]:
    """Keep the best units of many sites in one ranking, until their cost is nearest to a budget (FLAP's AL-AM).

    Args:
        scores: site → standardised unit scores.
        cost: space → cost of one of its units. FLAP takes 512/3 neurons for a head of LLaMA-7B; this project takes the
            unit's parameters.
        keep_cost: the budget, on the scale of `cost`.
        below_cut: as FLAP's released code cuts: the unit with which the cost comes nearest to the budget is the
            threshold, and stays no more than any of its score.

    Returns:
        site → kept units in ascending order. Every site keeps at least its best unit: no stock class has a block
        without heads or without columns.
    """
    sites = list(scores)
    flat = torch.cat([scores[site].double().cpu() for site in sites])
    costs = torch.cat([torch.full((scores[site].numel(),), cost[site.space], dtype=torch.float64) for site in sites])
    order = torch.sort(flat, descending=True, stable=True).indices
    spent = torch.cat([torch.zeros(1, dtype=torch.float64), costs[order].cumsum(0)])
    chosen = torch.zeros(flat.numel(), dtype=torch.bool)
    if below_cut:
        chosen = flat > flat[order[int((spent[1:] - keep_cost).abs().argmin())]]
    else:
        chosen[order[: int((spent - keep_cost).abs().argmin())]] = True
    kept: dict[Site, Tensor] = {}
    start = 0
    for site in sites:
        width = scores[site].numel()
        mask = chosen[start : start + width].clone()
        if not mask.any():
            mask[int(scores[site].argmax())] = True
        kept[site] = mask.nonzero().flatten()
        start += width
    return kept
