"""Low rank in place of selection: narrow queries and keys whose logits are nearest to the dense ones.

See compensation/README.md, section 8.

The logits of a head are a bilinear form, so q and k need not keep coordinates. With q' = Pᵀq and k' = Qᵀk the logits
of sample b are off by Q_b E K_bᵀ, E = I − P Qᵀ, and P and Q (d, d') minimise

    Σ_b tr(A_b E B_b Eᵀ) + λ ‖E‖²,

with A_b = Q_bᵀQ_b and B_b = K_bᵀK_b. This is CORP's own objective over a larger set: there P and Q have rows of kept
dimensions alone. Were all samples alike, a truncated SVD would be the minimum (Eckart and Young). The search starts
there, and goes on by conjugate gradients on both factors at once. Along a direction the objective is a polynomial of
degree four, whose least value is found exactly. Alternating least squares comes to the same minimum in more steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckpt_prune.calibration.logits import LogitMoments
from ckpt_prune.calibration.moments import total
from ckpt_prune.compensation.logit import (
    NEAR_ZERO,
    Choice,
    LogitDiagnostics,
    LogitSystem,
    Operator,
    absolute_strength,
    least_held_out,
    whole_system,
)
from ckpt_prune.compensation.methods import Units

Pair = tuple[Tensor, Tensor]
"""P and Q, (d, d') float64 each."""

TOLERANCE = 1e-9
"""A head is done when a step lowers its objective by less than this share."""
MAX_STEPS = 50
"""Steps at most. After so many, real heads are within 0.1 % of their least error."""
CHOICE_TOLERANCE = 1e-5
"""Tolerance of searches that only rank strengths or give a floor: these stop within a hundredth of the least error."""
ROUNDING = 1e-6
"""Share of a Gram's mean diagonal that is added to it: above the rounding of float32 moments."""


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
        system = whole_system(moments)
        return cls(system, system.operator(0))

    def strength(self, value: float, units: Units) -> float:
        """A strength on the scale of the samples' sums."""
        return float(absolute_strength(value, units, self.system.diagonal_mean))

    def error(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖², () float64, never negative."""
        rest = torch.eye(len(left), dtype=torch.float64, device=left.device) - left @ right.T
        return (rest * self.operator(rest[None])[0]).sum().clamp_min(0)


@dataclass(frozen=True)
class _Metric:
    """The objective of one head in coordinates that make the samples' mean the identity.

    Attributes:
        image: Z → the metric's image of Z, both in these coordinates, (g, d, d) each.
        target: I in these coordinates, what P Qᵀ is to come near.
        left: of a P in these coordinates its own, (d, d).
        right: likewise of Q.
    """

    image: Operator
    target: Tensor
    left: Tensor
    right: Tensor


def _metric(head: _Head, strength: float) -> _Metric:
    """The metric at an absolute strength."""
    scale = head.system.query_gram[0].trace().sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    grams = (head.system.query_gram[0], head.system.key_gram[0])
    (root, left), (other, right) = (_roots(gram / scale, strength**0.5) for gram in grams)

    def image(Z: Tensor) -> Tensor:
        dense = left @ Z @ right
        return left @ (head.operator(dense) + strength * dense) @ right

    return _Metric(image, root @ other, left, right)


def _roots(gram: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The square root of a Gram with a ridge, and its inverse."""
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0)
    values = values + ridge + (ROUNDING * values.mean()).clamp_min(torch.finfo(values.dtype).tiny ** 0.5)
    roots = values.sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def _from_svd(metric: _Metric, size: int) -> Pair:
    """The start that the truncated SVD gives, in the metric's coordinates."""
    U, values, Vt = torch.linalg.svd(metric.target)
    root = values[:size].sqrt()
    return U[:, :size] * root, Vt[:size].T * root


def _searched(metric: _Metric, start: Pair, tolerance: float = TOLERANCE, max_steps: int = MAX_STEPS) -> Pair:
    """P and Q that a search ends with.

    Args:
        metric: of the head.
        start: in the metric's coordinates.
        tolerance: see `TOLERANCE`.
        max_steps: at most.
    """
    X, Y = start
    rest = metric.target - X @ Y.T
    force = metric.image(rest[None])[0]
    least = _product(rest, force)
    whole = _product(metric.target, metric.image(metric.target[None])[0])
    way: tuple[Tensor, Tensor] | None = None
    before: tuple[Tensor, Tensor, float] | None = None
    for _ in range(max_steps):
        if not least > ROUNDING**2 * whole:
            break
        downhill = force @ Y, force.T @ X
        # The metric is near the identity: what is left of its condition is that of the factors.
        turned = _scaled(downhill[0], Y), _scaled(downhill[1], X)
        square = _product(downhill[0], turned[0]) + _product(downhill[1], turned[1])
        bend = 0.0
        if before is not None and before[2] > 0:
            kept = _product(before[0], turned[0]) + _product(before[1], turned[1])
            bend = max(0.0, (square - kept) / before[2])
        way = turned if way is None else (turned[0] + bend * way[0], turned[1] + bend * way[1])
        before = (*downhill, square)
        first, second = way[0] @ Y.T + X @ way[1].T, way[0] @ way[1].T
        moved = metric.image(torch.stack([first, second]))
        length, fall = _least_along(rest, force, (first, second), (moved[0], moved[1]))
        if not fall > tolerance * least:
            if bend == 0:
                break
            # Only the way was bad: the search starts anew from here.
            way = before = None
            continue
        X, Y = X + length * way[0], Y + length * way[1]
        rest = rest - length * first - length**2 * second
        force = force - length * moved[0] - length**2 * moved[1]
        least -= fall
    X, Y = _balanced(X, Y)
    return metric.left @ X, metric.right @ Y


def _least_along(
    rest: Tensor, force: Tensor, terms: tuple[Tensor, Tensor], moved: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """The length t at which ‖E − t Z₁ − t² Z₂‖² is least, and by how much that lowers it."""
    falls = np.array(
        [
            _product(terms[1], moved[1]),
            2 * _product(terms[0], moved[1]),
            _product(terms[0], moved[0]) - 2 * _product(terms[1], force),
            -2 * _product(terms[0], force),
            0.0,
        ]
    )
    if not np.isfinite(falls).all():
        return 0.0, 0.0
    lengths = [0.0, *(float(each.real) for each in np.roots(np.polyder(falls)) if abs(each.imag) <= 1e-9 * abs(each))]
    best = min(lengths, key=lambda length: float(np.polyval(falls, length)))
    return best, -float(np.polyval(falls, best))


def _scaled(gradient: Tensor, other: Tensor) -> Tensor:
    """A gradient times the inverse of the other factor's Gram."""
    gram = other.T @ other
    gram.diagonal().add_(ROUNDING**2 * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny)
    scaled: Tensor = torch.linalg.solve(gram, gradient.T).T
    return scaled


def _balanced(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product whose columns are orthogonal and as long in one as in the other."""
    (left, upper), (right, lower) = torch.linalg.qr(X), torch.linalg.qr(Y)
    U, values, Vt = torch.linalg.svd(upper @ lower.T)
    root = values.sqrt()
    return left @ U * root, right @ Vt.T * root


def _product(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())


def width_errors(moments: LogitMoments) -> Tensor:
    """Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖² of each head for every d', at the truncated SVD: (H, d + 1) float64.

    Entry k is of d' = d − k. The search starts there, so that no error of `solve_low_rank` without strength is larger.
    """
    found = []
    for index in range(moments.heads):
        head = _Head.of(moments.of_head(index))
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
        head = _Head.of(moments.of_head(index))
        metric = _metric(head, head.strength(value, units))
        tried = [_searched(metric, _from_svd(metric, size), tolerance, max_steps)]
        if other is not None:
            left, right = other[0][index], other[1][index]
            if head.error(left, right) < head.error(*tried[0]):
                start = torch.linalg.solve(metric.left, left), torch.linalg.solve(metric.right, right)
                tried += [_searched(metric, start, tolerance, max_steps), (left, right)]
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
    heads = (_Head.of(moments.of_head(index)) for index in range(moments.heads))
    return torch.stack([head.error(*pair) for head, *pair in zip(heads, left, right, strict=True)])


def diagnose_low_rank(moments: LogitMoments, system: LogitSystem, reached: Tensor) -> LogitDiagnostics:
    """The diagnostics of a layer; its floor is what this form reaches with next to no strength.

    Args:
        moments: of the layer's queries and keys.
        system: of the dimensions that would stay: what is lost without compensation is what the others carry.
        reached: errors of a solution, (H,).
    """
    lost = system.dropped_energy.clamp_min(0)
    found = solve_low_rank(moments, system.kept.head_dim, NEAR_ZERO, tolerance=CHOICE_TOLERANCE)
    return LogitDiagnostics.of(lost, torch.minimum(torch.minimum(found.errors, reached), lost))


def choose_low_rank(
    folds: Sequence[LogitMoments], kept: Tensor, grid: Sequence[float], units: Units = "relative"
) -> Choice:
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
        parts = [fold.of_head(head) for fold in folds]
        train, scored = _Head.of(total([*parts[:held], *parts[held + 1 :]])), _Head.of(parts[held])
        metrics = [_metric(train, train.strength(value, units)) for value in grid]
        found = [scored.error(*_searched(metric, _from_svd(metric, size), CHOICE_TOLERANCE)) for metric in metrics]
        return torch.stack(found), scored.system.energy.sum()

    return least_held_out(folds, kept.shape[0], grid, errors)
