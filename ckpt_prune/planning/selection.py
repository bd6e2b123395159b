"""Which units stay: counts from ratios, and FLAP's rankings over blocks (METHODS section 2). Pure functions."""

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_UP, Decimal

import torch
from torch import Tensor

from ckpt_prune.architectures.sites import Site
from ckpt_prune.architectures.spaces import Rounding, SpaceName
from ckpt_prune.errors import UserError

_ROUNDING = {"floor": ROUND_FLOOR, "ceil": ROUND_CEILING, "nearest": ROUND_HALF_UP}


def units_kept(units: int, ratio: float, rounding: Rounding, multiple_of: int = 1) -> int:
    """Units that stay when a share `ratio` of `units` goes.

    The product is taken in decimal, so that 0.07 of 100 is 7 and not a hair more, which `ceil` would turn into 8.
    The kept width is rounded up to a multiple of `multiple_of`, never past `units`.

    Raises:
        UserError: nothing would stay.
    """
    dropped = int((Decimal(units) * Decimal(repr(ratio))).to_integral_value(_ROUNDING[rounding]))
    kept = units - dropped
    if kept < 1:
        raise UserError(f"ratio {ratio:g} would drop all {units} units of a space: at least one must stay")
    return min(units, -(-kept // multiple_of) * multiple_of)


def unit_scores(columns: Tensor, per_unit: int) -> Tensor:
    """Score of each unit: the sum over its columns, (units * per_unit,) → (units,)."""
    return columns.view(-1, per_unit).sum(1)


def select(scores: Tensor, keep: int) -> Tensor:
    """Indices of the `keep` highest scores in ascending order, (keep,) int64; ties go to the lower index."""
    order = torch.sort(scores.cpu(), descending=True, stable=True).indices
    return order[:keep].sort().values


def select_in_heads(scores: Tensor, keep: int) -> Tensor:
    """The `keep` highest scores of every head, as ascending indices into the rows of q and k.

    Args:
        scores: (H, d).
        keep: d', per head.

    Returns:
        (H d') int64: head h's dimension j is h d + j.
    """
    width = scores.shape[1]
    return torch.cat([select(head, keep) + index * width for index, head in enumerate(scores)])


def in_heads(kept: Tensor, heads: int, width: int) -> Tensor:
    """Kept rows of q and k (H d',) as dimensions of each head, (H, d') int64."""
    return kept.view(heads, -1) - torch.arange(heads, device=kept.device)[:, None] * width


def standardise(columns: Tensor, per_unit: int) -> Tensor:
    """FLAP's adaptive metric: z-scores over a block's columns (unbiased deviation), averaged over a unit's columns.

    A block whose columns all score the same gets zeros.
    """
    deviation = columns.std() if columns.numel() > 1 else columns.new_zeros(())
    z = (columns - columns.mean()) / deviation if deviation > 0 else torch.zeros_like(columns)
    return z.view(-1, per_unit).mean(1)


def select_ranked(
    scores: Mapping[Site, Tensor], cost: Mapping[SpaceName, float], keep_cost: float
) -> dict[Site, Tensor]:
    """Keep units in one ranking over many sites until their cost is nearest to a budget (FLAP's AL-AM).

    Args:
        scores: site → standardised unit scores.
        cost: space → cost of one of its units (FLAP: 512/3 neurons for a head of LLaMA-7B; here its parameters).
        keep_cost: the budget, in the same units.

    Returns:
        site → kept units in ascending order. The best unit of every site is always kept: a block without heads or
        without columns has no stock form.
    """
    sites = list(scores)
    flat = torch.cat([scores[site].double().cpu() for site in sites])
    costs = torch.cat([torch.full((scores[site].numel(),), cost[site.space], dtype=torch.float64) for site in sites])
    order = torch.sort(flat, descending=True, stable=True).indices
    spent = torch.cat([torch.zeros(1, dtype=torch.float64), costs[order].cumsum(0)])
    chosen = torch.zeros(flat.numel(), dtype=torch.bool)
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
