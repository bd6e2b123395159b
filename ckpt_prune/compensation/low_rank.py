"""Low rank in place of selection: narrow queries and keys whose logits are nearest to the dense ones.

With q' = Pᵀq, k' = Qᵀk and E = I − P Qᵀ, P and Q (d, d') minimise Σ_b tr(A_b E B_b Eᵀ) + λ ‖E‖². The search starts
from a truncated SVD, which is the minimum if all samples are alike, and moves both factors at once (`low_rank_search`).
See compensation/README.md, section 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.compensation.logit import (
    NEAR_ZERO,
    LogitDiagnostics,
    LogitFit,
    LogitSystem,
    Operator,
    StrengthChoice,
    absolute_logit_strength,
    full_system,
    least_held_out,
    refit_logits,
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
    """The samples of one head, all of its dimensions kept. `operator` maps E (g, d, d) to Σ_b A_b E B_b, as many."""

    system: LogitSystem
    operator: Operator

    @classmethod
    def of(cls, moments: LogitMoments) -> "_Head":
        system = full_system(moments)
        return cls(system, system.operator(0))

    def strength(self, value: float, units: Units) -> float:
        """Return a strength on the scale of the samples' sums."""
        return float(absolute_logit_strength(value, units, self.system.diagonal_mean))

    def error(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖², () float64, never negative."""
        missing = torch.eye(len(left), dtype=torch.float64, device=left.device) - left @ right.T
        return (missing * self.operator(missing[None])[0]).sum().clamp_min(0)


def _metric(head: _Head, strength: float) -> LogitMetric:
    """Build the metric at an absolute strength."""
    system = head.system
    coarse = system.operator(0, torch.float32)
    return build_metric(head.operator, coarse, system.query_gram[0], system.key_gram[0], strength)


def width_errors(moments: LogitMoments) -> Tensor:
    """Return Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖² of each head for every d', at the truncated SVD: (H, d + 1) float64.

    Entry k is of d' = d − k. The search starts there, so that no error of `solve_low_rank` without strength is larger.
    """
    errors_of_heads = []
    for index in range(moments.heads):
        head = _Head.of(moments.select_head(index))
        metric = _metric(head, 0.0)
        U, values, Vt = torch.linalg.svd(metric.target)
        # What each direction carries of I, in the dense coordinates: (direction, d, d).
        parts = (metric.left @ U * values).T[:, :, None] * (Vt @ metric.right)[:, None, :]
        dropped_parts = parts.flip(0).cumsum(0)
        errors = (dropped_parts * head.operator(dropped_parts)).sum((1, 2)).clamp_min(0)
        errors_of_heads.append(torch.cat([errors.new_zeros(1), errors]).cummax(0).values)
    return torch.stack(errors_of_heads)


def solve_low_rank(
    moments: LogitMoments,
    size: int,
    value: float,
    units: Units = "relative",
    other: Pair | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_steps: int = MAX_STEPS,
) -> LogitFit:
    """Find P and Q of every head.

    Args:
        size: d', from 1 to d.
        value: the strength, zero or more; a relative one is times the mean diagonal of the operator E ↦ Σ_b A_b E B_b.
        other: P and Q of another solution, (H, d, d') each: no head's error is above its own.
    """
    best_of_heads = []
    for index in range(moments.heads):
        head = _Head.of(moments.select_head(index))
        metric = _metric(head, head.strength(value, units))
        candidates = [search_factors(metric, start_from_svd(metric, size), tolerance, max_steps)]
        if other is not None:
            left, right = other[0][index], other[1][index]
            if head.error(left, right) < head.error(*candidates[0]):
                candidates += [search_factors(metric, metric.inside(left, right), tolerance, max_steps), (left, right)]
        errors = [head.error(*pair) for pair in candidates]
        best = min(range(len(candidates)), key=lambda at: float(errors[at]))
        best_of_heads.append((*candidates[best], errors[best]))
    lefts, rights, errors_of_heads = (torch.stack(parts) for parts in zip(*best_of_heads, strict=True))
    return LogitFit(lefts, rights, errors_of_heads)


def fit_low_rank(moments: LogitMoments, system: LogitSystem, kept: Tensor, value: float, units: Units) -> LogitFit:
    """Solve for narrow queries and keys whose errors are, head by head, no larger than those of CORP's solution."""
    selected = refit_logits(moments, system, kept, value, units)
    return solve_low_rank(moments, kept.shape[1], value, units, (selected.left, selected.right))


def diagnose_low_rank(moments: LogitMoments, system: LogitSystem, fit: LogitFit) -> LogitDiagnostics:
    """Return the diagnostics of a layer; the floor is what a search from `fit` reaches at the strength `NEAR_ZERO`.

    Args:
        moments: of the layer's queries and keys.
        system: of the dimensions that would stay: without compensation, the others' share of the logits is lost.
        fit: to these moments or to others.
    """
    uncompensated = system.dropped_energy.clamp_min(0)
    floors = []
    for index, pair in enumerate(zip(fit.left, fit.right, strict=True)):
        head = _Head.of(moments.select_head(index))
        metric = _metric(head, head.strength(NEAR_ZERO, "relative"))
        factors = search_factors(metric, metric.inside(*pair), CHOICE_TOLERANCE, MAX_STEPS)
        floors.append(torch.minimum(head.error(*factors), head.error(*pair)))
    return LogitDiagnostics.of(uncompensated, torch.minimum(torch.stack(floors), uncompensated))


def choose_low_rank(
    folds: Sequence[LogitMoments], kept: Tensor, grid: Sequence[float], units: Units = "relative"
) -> StrengthChoice:
    """Choose the strength of `grid` with the least held-out logit error over `folds`, one for all heads.

    Args:
        folds: moments of disjoint samples.
        kept: (H, d') int64; their number alone counts.
    """
    size = kept.shape[1]

    def errors(head: int, held: int) -> tuple[Tensor, Tensor]:
        parts = [fold.select_head(head) for fold in folds]
        train, scored = _Head.of(sum_folds([*parts[:held], *parts[held + 1 :]])), _Head.of(parts[held])
        metrics = [_metric(train, train.strength(value, units)) for value in grid]
        errors_of_strengths = [
            scored.error(*search_factors(metric, start_from_svd(metric, size), CHOICE_TOLERANCE, MAX_STEPS))
            for metric in metrics
        ]
        return torch.stack(errors_of_strengths), scored.system.energy.sum()

    return least_held_out(folds, kept.shape[0], grid, errors)
