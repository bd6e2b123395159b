"""Newton steps without a Hessian: its products with vectors by a second backward pass, conjugate gradients, Armijo."""

from collections.abc import Callable

import torch
from torch import Tensor

ARMIJO, SHORTER, TRIES = 1e-5, 0.9, 50
"""SNOWS: share of the slope that a step must gain, what an attempt is shortened by, and how many there are."""


def solve_by_products(product: Callable[[Tensor], Tensor], right: Tensor, residual: float, most: int) -> Tensor:
    """Return x with A x = b to a relative residual, by conjugate gradients from zero (Nocedal and Wright, Alg. 5.2).

    A is symmetric and known by its products. Where it curves down, the search ends with what was found before, or with
    b itself in the first iteration (Newton-CG, Alg. 7.1 there): x goes along b in any case, x·b > 0.

    Args:
        product: v → A v, both (n).
        right: b, (n).
        residual: of ‖A x − b‖, as a share of ‖b‖.
        most: iterations.
    """
    x, lacking = torch.zeros_like(right), right.clone()
    direction, energy = lacking.clone(), lacking @ lacking
    goal = residual**2 * energy
    for iteration in range(most):
        if not energy > goal:
            break
        curved = product(direction)
        curvature = direction @ curved
        if not curvature > 0:
            return x if iteration else right.clone()
        step = energy / curvature
        x += step * direction
        lacking -= step * curved
        new_energy = lacking @ lacking
        direction = lacking + new_energy / energy * direction
        energy = new_energy
    return x


def search_line(loss: Callable[[float], float], start: float, slope: float) -> float:
    """Return the longest of 1, 0.9, 0.81 … of a step that lowers the loss enough; 0 if none of 50 does (Armijo).

    Args:
        loss: share of the step → loss there.
        start: loss without the step.
        slope: derivative of the loss along the step, at its start, on other samples perhaps; above 0 it counts as 0.
    """
    share = 1.0
    for _ in range(TRIES):
        if loss(share) <= start + ARMIJO * share * min(slope, 0.0):
            return share
        share *= SHORTER
    return 0.0
