"""Search for two narrow factors whose product is nearest to a matrix, in a metric that is nearly the identity.

With factors X and Y (d, d') and a positive operator M on (d, d) matrices the objective is ⟨E, M E⟩, E = T − X Yᵀ. A
step of limited-memory BFGS (Nocedal and Wright, Numerical Optimization, algorithm 7.5) needs one product with M. It
starts from the inverse Hessian that there would be if M were the identity and the other factor fixed.
See compensation/README.md, section 8.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ckpt_prune.compensation.logit import Operator

Pair = tuple[Tensor, Tensor]
"""P and Q, (d, d') float64 each."""

ROUNDING = 1e-6
"""Share of a Gram's mean diagonal that is added to it: above the rounding of float32 moments."""
MEMORY = 8
"""Steps that the search remembers."""
ENOUGH = 1e-4
"""A step is taken if the objective falls by this share of what the slope promises (Armijo)."""
MAX_TRIALS = 10
"""Lengths that are tried along one direction."""
COARSE_TOLERANCE = 1e-6
"""Steps that lower the objective by less than this share are made with products in float64."""


@dataclass(frozen=True)
class LogitMetric:
    """The objective of one head in coordinates that make the samples' mean the identity.

    Attributes:
        image: Z → the metric's image of Z, both in these coordinates, (g, d, d) float64 each.
        coarse: `image` with products in float32.
        target: I in these coordinates, which X Yᵀ is to come near.
        left: maps P in these coordinates to P, (d, d).
        right: maps Q, likewise.
    """

    image: Operator
    coarse: Operator
    target: Tensor
    left: Tensor
    right: Tensor

    def inside(self, left: Tensor, right: Tensor) -> Pair:
        """Return P and Q in these coordinates."""
        return torch.linalg.solve(self.left, left), torch.linalg.solve(self.right, right)

    def outside(self, X: Tensor, Y: Tensor) -> Pair:
        """Return the P and Q that factors in these coordinates stand for."""
        return self.left @ X, self.right @ Y


def build_metric(
    operator: Operator, coarse: Operator, query_gram: Tensor, key_gram: Tensor, strength: float
) -> LogitMetric:
    """Build the metric of a head.

    Args:
        operator: E (g, d, d) → Σ_b A_b E B_b, as many.
        coarse: `operator` in float32.
        query_gram: Σ_b A_b tr B_b, (d, d) float64.
        key_gram: Σ_b B_b tr A_b, likewise, of the same trace.
    """
    scale = query_gram.trace().sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    (root, left), (other, right) = (_roots(gram / scale, strength**0.5) for gram in (query_gram, key_gram))

    def image(product: Operator, Z: Tensor) -> Tensor:
        dense = left @ Z @ right
        return left @ (product(dense) + strength * dense) @ right

    in_single = partial(image, lambda dense: coarse(dense.float()).double())
    return LogitMetric(partial(image, operator), in_single, root @ other, left, right)


def _roots(gram: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return the square root of a Gram with a ridge, and its inverse."""
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0)
    values = values + ridge + (ROUNDING * values.mean()).clamp_min(torch.finfo(values.dtype).tiny ** 0.5)
    roots = values.sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def start_from_svd(metric: LogitMetric, size: int) -> Pair:
    """Return the factors that the truncated SVD gives, in the metric's coordinates."""
    U, values, Vt = torch.linalg.svd(metric.target)
    root = values[:size].sqrt()
    return U[:, :size] * root, Vt[:size].T * root


@dataclass(frozen=True)
class _Point:
    """A point of the search.

    Attributes:
        factors: X and Y, (2, d, d').
        value: ⟨E, M E⟩.
        uphill: half of its gradient, (2, d, d').
    """

    factors: Tensor
    value: float
    uphill: Tensor

    @classmethod
    def at(cls, factors: Tensor, target: Tensor, image: Operator) -> "_Point":
        """Evaluate the objective and its gradient by one product with the metric."""
        X, Y = factors
        missing = target - X @ Y.T
        force = image(missing[None])[0]
        return cls(factors, _product(missing, force), -torch.stack([force @ Y, force.T @ X]))


@dataclass(frozen=True)
class _Step:
    """One past step, and how it changed the gradient, (2, d, d') each; `product` is that of the two."""

    moved: Tensor
    changed: Tensor
    product: float


def search_factors(metric: LogitMetric, start: Pair, tolerance: float, max_steps: int) -> Pair:
    """Search for the P and Q of least error.

    Args:
        start: in the metric's coordinates.
        tolerance: the search ends when a step lowers the objective by less than this share.
    """
    nothing = ROUNDING**2 * _product(metric.target, metric.image(metric.target[None])[0])
    image, least = metric.coarse, max(tolerance, COARSE_TOLERANCE)
    here = _Point.at(torch.stack(start), metric.target, image)
    past: deque[_Step] = deque(maxlen=MEMORY)
    for _ in range(max_steps):
        if not here.value > nothing:
            break
        way = -_precondition(here, past)
        # Each factor's step is right were the other fixed: of the first, half is near the best of both.
        ahead = _ahead(here, way, 1.0 if past else 0.5, metric.target, image)
        fall = 0.0 if ahead is None else here.value - ahead.value
        if ahead is not None:
            moved, changed = ahead.factors - here.factors, ahead.uphill - here.uphill
            product = _product(moved, changed)
            if product > 0:
                past.append(_Step(moved, changed, product))
            here = ahead
        if fall > least * here.value:
            continue
        if image is metric.coarse and tolerance < least:
            image, least = metric.image, tolerance
            here = _Point.at(here.factors, metric.target, image)
        elif ahead is None and past:
            # Only the way was bad: the search starts anew from here.
            past.clear()
        else:
            break
    return metric.outside(*_balance(*here.factors))


def _precondition(here: _Point, past: deque[_Step]) -> Tensor:
    """Multiply the gradient by the inverse Hessian that past steps approximate, by two loops over them."""
    scaled = _scaling(here.factors)
    turned, shares = here.uphill.clone(), []
    for step in reversed(past):
        share = _product(step.moved, turned) / step.product
        turned -= share * step.changed
        shares.append(share)
    turned = scaled(turned)
    if past:
        last = past[-1]
        turned *= last.product / _product(last.changed, scaled(last.changed))
    for step, share in zip(past, reversed(shares), strict=True):
        turned += (share - _product(step.changed, turned) / step.product) * step.moved
    return turned


def _scaling(factors: Tensor) -> Callable[[Tensor], Tensor]:
    """Return G (2, d, d') → that of X times the inverse Gram of Y, and that of Y times the inverse Gram of X."""
    grams = (factors.mT @ factors).flip(0)
    diagonals = grams.diagonal(dim1=1, dim2=2)
    diagonals += ROUNDING**2 * diagonals.mean(1, keepdim=True) + torch.finfo(grams.dtype).tiny
    factor, pivots = torch.linalg.lu_factor(grams)
    return lambda G: torch.linalg.lu_solve(factor, pivots, G, left=False)


def _ahead(here: _Point, way: Tensor, length: float, target: Tensor, image: Operator) -> _Point | None:
    """Return the first point along a direction that is low enough, of shrinking lengths; None if there is none."""
    slope = 2 * _product(here.uphill, way)
    if not slope < 0:
        return None
    for _ in range(MAX_TRIALS):
        point = _Point.at(here.factors + length * way, target, image)
        if point.value <= here.value + ENOUGH * length * slope:
            return point
        # The least of the parabola through both values and the slope, unless that is next to an end.
        bend = point.value - here.value - length * slope
        best = -slope * length**2 / (2 * bend) if bend > 0 else 0.0
        length = min(max(best, 0.1 * length), 0.5 * length)
    return None


def _balance(X: Tensor, Y: Tensor) -> Pair:
    """Return factors of the same product whose columns are orthogonal and as long in one as in the other."""
    (left, upper), (right, lower) = torch.linalg.qr(X), torch.linalg.qr(Y)
    U, values, Vt = torch.linalg.svd(upper @ lower.T)
    root = values.sqrt()
    return left @ U * root, right @ Vt.T * root


def _product(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1), b.reshape(-1)))
