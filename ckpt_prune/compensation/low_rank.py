"""Low rank in place of selection: narrow queries and keys whose logits are nearest to the dense ones.

See compensation/README.md, section 8.

The logits of a head are a bilinear form, so q and k need not keep coordinates. With q' = Pᵀq and k' = Qᵀk the logits
of sample b are off by Q_b E K_bᵀ, E = I − P Qᵀ, and P and Q (d, d') minimise

    Σ_b tr(A_b E B_b Eᵀ) + λ ‖E‖²,

with A_b = Q_bᵀQ_b and B_b = K_bᵀK_b. This is CORP's own objective over a larger set: there P and Q have rows of kept
dimensions alone. Were all samples alike, a truncated SVD would be the minimum (Eckart and Young). The search starts
there, and goes on over both factors at once (`low_rank_search`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.compensation.logit import (
    NEAR_ZERO,
    LogitDiagnostics,
    LogitSystem,
    Operator,
    StrengthChoice,
    absolute_logit_strength,
    full_system,
    least_held_out,
)
from ckpt_prune.compensation.low_rank_search import LogitMetric, Pair, build_metric, search_factors, start_from_svd
from ckpt_prune.compensation.methods import Units
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.logits import LogitMoments

TOLERANCE = 3e-8
"""A head is done when a step lowers its objective by less than this share."""
MAX_STEPS = 60
"""Steps at most. After so many, real heads are within 0.01 % of their least error."""
CHOICE_TOLERANCE = 1e-5
"""Tolerance of searches that only rank strengths or give a floor: these stop within a hundredth of the least error."""


@dataclass(frozen=True)
class _Head:
    """The samples of one head, all of its dimensions kept.

    Attributes:
        system: of all dimensions.
        operator: E (g, d, d) → Σ_b A_b E B_b, as many.
    """

    system: LogitSystem
    operator: Operator

    @classmethod
    def of(cls, moments: LogitMoments) -> "_Head":
        """Of the moments of one head."""
        system = full_system(moments)
        return cls(system, system.operator(0))

    def strength(self, value: float, units: Units) -> float:
        """A strength on the scale of the samples' sums."""
        return float(absolute_logit_strength(value, units, self.system.diagonal_mean))

    def error(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖², () float64, never negative."""
        rest = torch.eye(len(left), dtype=torch.float64, device=left.device) - left @ right.T
        return (rest * self.operator(rest[None])[0]).sum().clamp_min(0)


def _metric(head: _Head, strength: float) -> LogitMetric:
    """The metric at an absolute strength."""
    system = head.system
    coarse = system.operator(0, torch.float32)
    return build_metric(head.operator, coarse, system.query_gram[0], system.key_gram[0], strength)


def width_errors(moments: LogitMoments) -> Tensor:
    """Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖² of each head for every d', at the truncated SVD: (H, d + 1) float64.

    Entry k is of d' = d − k. The search starts there, so that no error of `solve_low_rank` without strength is larger.
    """
    found = []
    for index in range(moments.heads):
        head = _Head.of(moments.select_head(index))
        metric = _metric(head, 0.0)
        U, values, Vt = torch.linalg.svd(metric.target)
        # What each direction carries of I, in the dense coordinates: (direction, d, d).
        parts = (metric.left @ U * values).T[:, :, None] * (Vt @ metric.right)[:, None, :]
        rests = parts.flip(0).cumsum(0)
        errors = (rests * head.operator(rests)).sum((1, 2)).clamp_min(0)
        found.append(torch.cat([errors.new_zeros(1), errors]).cummax(0).values)
    return torch.stack(found)


@dataclass(frozen=True)
class LowRank:
    """What a layer ends with.

    Attributes:
        left: P of each head, (H, d, d') float64.
        right: Q, likewise.
        errors: Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖², (H,) float64.
    """

    left: Tensor
    right: Tensor
    errors: Tensor


def solve_low_rank(
    moments: LogitMoments,
    size: int,
    value: float,
    units: Units = "relative",
    other: Pair | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_steps: int = MAX_STEPS,
) -> LowRank:
    """P and Q of every head.

    Args:
        moments: of the layer's queries and keys.
        size: d', from 1 to d.
        value: the strength, zero or more; a relative one is times the mean diagonal of the operator E ↦ Σ_b A_b E B_b.
        units: of the strength.
        other: P and Q of another solution, (H, d, d') each: no head's error is above its own.
        tolerance: see `TOLERANCE`.
        max_steps: of a head, at most.

    Raises:
        ValueError: the strength is negative or not a number.
    """
    found = []
    for index in range(moments.heads):
        head = _Head.of(moments.select_head(index))
        metric = _metric(head, head.strength(value, units))
        tried = [search_factors(metric, start_from_svd(metric, size), tolerance, max_steps)]
        if other is not None:
            left, right = other[0][index], other[1][index]
            if head.error(left, right) < head.error(*tried[0]):
                tried += [search_factors(metric, metric.inside(left, right), tolerance, max_steps), (left, right)]
        errors = [head.error(*each) for each in tried]
        best = min(range(len(tried)), key=lambda at: float(errors[at]))
        found.append((*tried[best], errors[best]))
    return LowRank(*(torch.stack(parts) for parts in zip(*found, strict=True)))


def pair_errors(moments: LogitMoments, left: Tensor, right: Tensor) -> Tensor:
    """Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖² of every head, (H,) float64, never negative.

    Args:
        moments: of the samples to measure on.
        left: P, (H, d, d') float64, fitted to any.
        right: Q, likewise.
    """
    heads = (_Head.of(moments.select_head(index)) for index in range(moments.heads))
    return torch.stack([head.error(*pair) for head, *pair in zip(heads, left, right, strict=True)])


def diagnose_low_rank(moments: LogitMoments, system: LogitSystem, left: Tensor, right: Tensor) -> LogitDiagnostics:
    """The diagnostics of a layer; its floor is what a search from a fit reaches with next to no strength.

    Args:
        moments: of the layer's queries and keys.
        system: of the dimensions that would stay: what is lost without compensation is what the others carry.
        left: P of the fit, (H, d, d') float64.
        right: Q, likewise.
    """
    lost = system.dropped_energy.clamp_min(0)
    floors = []
    for index, pair in enumerate(zip(left, right, strict=True)):
        head = _Head.of(moments.select_head(index))
        metric = _metric(head, head.strength(NEAR_ZERO, "relative"))
        found = search_factors(metric, metric.inside(*pair), CHOICE_TOLERANCE, MAX_STEPS)
        floors.append(torch.minimum(head.error(*found), head.error(*pair)))
    return LogitDiagnostics.of(lost, torch.minimum(torch.stack(floors), lost))


def choose_low_rank(
    folds: Sequence[LogitMoments], kept: Tensor, grid: Sequence[float], units: Units = "relative"
) -> StrengthChoice:
    """The strength of `grid` with the least held-out logit error over `folds`, one for all heads.

    Args:
        folds: moments of disjoint samples.
        kept: (H, d') int64; their number alone counts.
        grid: strengths to try, none negative.
        units: of the grid.

    Returns:
        The choice, as `logit.choose_strength` returns it.

    Raises:
        ValueError: fewer than two folds, an empty grid, or a negative strength.
    """
    size = kept.shape[1]

    def errors(head: int, held: int) -> tuple[Tensor, Tensor]:
        parts = [fold.select_head(head) for fold in folds]
        train, scored = _Head.of(sum_folds([*parts[:held], *parts[held + 1 :]])), _Head.of(parts[held])
        metrics = [_metric(train, train.strength(value, units)) for value in grid]
        found = [
            scored.error(*search_factors(metric, start_from_svd(metric, size), CHOICE_TOLERANCE, MAX_STEPS))
            for metric in metrics
        ]
        return torch.stack(found), scored.system.energy.sum()

    return least_held_out(folds, kept.shape[0], grid, errors)
