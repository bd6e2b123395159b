"""Closed forms that solve a linear system: least squares on the output, ridge, affine, GRAIL.

See compensation/README.md, section 2.

Strengths are absolute here: λ is added to Gram *sums*. `methods.absolute_strength` converts a relative one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import Fit, Solution

RELATIVE_CUTOFF = 1e-12
"""Eigenvalues below this share of the largest carry no information in float64 and are treated as zero."""
FACTORED_IN_PLACE = 8192
"""Columns from which on a matrix holds its own factor for a while: a second one takes 4 GB at 23,000."""
PANEL = 512
"""Columns that are factorised at a time in place."""


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return `right` times the inverse of a symmetric positive semi-definite `matrix`, or times its pseudo-inverse.

    One more matrix is held, its factor. From a width of `FACTORED_IN_PLACE` on none is: there the factor takes the
    place of one triangle of `matrix` for a while.

    Args:
        matrix: (n, n) float64, alike in both triangles up to rounding.
        right: (m, n) float64.
    """
    with _factor(matrix) as factor:
        if factor is not None:
            # The two steps of `torch.cholesky_solve`, which would copy the factor.
            half = torch.linalg.solve_triangular(factor, right.T, upper=False)
            solution: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True, out=half).T
            return solution
    values, vectors = torch.linalg.eigh(matrix)
    solution = ((right @ vectors) * reciprocals(values)) @ vectors.T
    return solution


@contextmanager
def _factor(matrix: Tensor) -> Iterator[Tensor | None]:
    """Give Cholesky's factor of a matrix, of which only the lower triangle may be read; None if it is singular."""
    if len(matrix) < FACTORED_IN_PLACE:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        yield factor if int(failed) == 0 and _is_regular(factor) else None
        return
    diagonal = matrix.diagonal().clone()
    try:
        yield matrix if _factor_in_place(matrix) and _is_regular(matrix) else None
    finally:
        # The factor took the lower triangle, the upper one is as it was.
        for panel in _panels(matrix):
            square = matrix[panel, panel].triu(1)
            matrix[panel, panel] = square + square.T
            matrix[panel.stop :, panel] = matrix[panel, panel.stop :].T
        matrix.diagonal().copy_(diagonal)


def _factor_in_place(matrix: Tensor) -> bool:
    """Write Cholesky's factor into the lower triangle, a panel of columns at a time; False if the matrix has none."""
    for panel in _panels(matrix):
        before, below = slice(0, panel.start), slice(panel.stop, None)
        square = torch.addmm(matrix[panel, panel], matrix[panel, before], matrix[panel, before].T, alpha=-1)
        factor, failed = torch.linalg.cholesky_ex(square)
        if int(failed):
            return False
        lower = torch.addmm(matrix[below, panel], matrix[below, before], matrix[panel, before].T, alpha=-1)
        matrix[below, panel] = torch.linalg.solve_triangular(factor, lower.T, upper=False).T
        matrix[panel, panel] = factor + matrix[panel, panel].triu(1)
    return True


def _panels(matrix: Tensor) -> list[slice]:
    width = len(matrix)
    return [slice(start, min(start + PANEL, width)) for start in range(0, width, PANEL)]


def _is_regular(factor: Tensor) -> bool:
    """Whether the last pivots are large enough: rounding lets some singular matrices through the factorisation."""
    pivots = factor.diagonal().square()
    return bool(pivots.amin() > RELATIVE_CUTOFF * pivots.amax())


def reciprocals(values: Tensor) -> Tensor:
    """Return eigenvalues of the pseudo-inverse, (n,): 1 / `values`, and 0 below `RELATIVE_CUTOFF` of the largest."""
    used = values > RELATIVE_CUTOFF * values.abs().amax()
    return torch.where(used, 1 / torch.where(used, values, 1.0), 0.0)


def least_squares(weight_kept: Tensor, fit: Fit) -> Solution:
    """Map the pruned output linearly to the target: T W_K with T = C W_Kᵀ (W_K G W_Kᵀ)^† (RCPU v1 eq. 3-4)."""
    gram, cross, _ = fit.second_moments()
    output_gram = weight_kept @ gram @ weight_kept.T
    return Solution(solve(output_gram, cross @ weight_kept.T) @ weight_kept)


def shrink(base: Tensor | None, fit: Fit, strength: float) -> Tensor:
    """Minimise Σ ‖y − Ŵ x‖² + λ ‖Ŵ − base‖² over Ŵ, as base + (C − base G)(G + λ I)⁻¹; (d_out, k). None is zero.

    This equals (C + λ base)(G + λ I)⁻¹. Written as a correction it leaves `base` alone wherever the tokens say nothing,
    also at λ = 0 with a singular G, and it loses no digits at a large λ.
    """
    gram, cross, _ = fit.second_moments()
    right = cross if base is None else cross - base @ gram
    with _penalise(gram, strength):
        solution = solve(gram, right)
    return solution if base is None else base + solution


@contextmanager
def _penalise(gram: Tensor, strength: float) -> Iterator[None]:
    """Add λ to the diagonal of a Gram for a while: a copy of it takes 4 GB at 23,000 kept columns."""
    diagonal = gram.diagonal().clone()
    try:
        gram.diagonal().add_(strength)
        yield
    finally:
        gram.diagonal().copy_(diagonal)


def ridge(weight_kept: Tensor, fit: Fit, strength: float) -> Solution:
    """Return (C + λ W_K)(G + λ I)⁻¹, which tends to W_K as λ grows (RCPU eq. 4)."""
    return Solution(shrink(weight_kept, fit, strength), details={"strength": strength})


def affine(weight_kept: Tensor, fit: Fit, strength: float) -> Solution:
    """Fit ridge on centred moments and the bias that matches the means, μ_y − Ŵ μ_K (CORP eq. 7-9).

    CORP writes Ŵ = W_K + W_D Σ_DK (Σ_KK + λ I)⁻¹, which is algebraically the same. Its λ is per token in
    eq. 9, and beside a sum over tokens in its eq. 8 and 21-25: the two differ by the number of tokens.
    """
    weight = shrink(weight_kept, fit.centre(), strength)
    return Solution(weight, fit.target_mean - weight @ fit.mean, {"strength": strength})


def grail(weight_kept: Tensor, fit: Fit, strength: float) -> Solution:
    """Return C (G + λ I)⁻¹, which tends to zero as λ grows (GRAIL)."""
    return Solution(shrink(torch.zeros_like(weight_kept), fit, strength), details={"strength": strength})
