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


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return `right` times the inverse of a symmetric positive semi-definite `matrix`, or times its pseudo-inverse.

    One more matrix is held, its factor.

    Args:
        matrix: (n, n) float64; only one triangle need be exact.
        right: (m, n) float64.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal().square()
    # Rounding lets some singular matrices through the factorisation: their last pivots give them away.
    if int(failed) == 0 and bool(pivots.amin() > RELATIVE_CUTOFF * pivots.amax()):
        # The two steps of `torch.cholesky_solve`, which would copy the factor.
        half = torch.linalg.solve_triangular(factor, right.T, upper=False)
        solution: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True).T
    else:
        values, vectors = torch.linalg.eigh(matrix)
        solution = ((right @ vectors) * reciprocals(values)) @ vectors.T
    return solution


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
