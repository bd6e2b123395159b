"""Cost of dropping some inputs of a projection, and how much of it the kept inputs can make up (CORP C.1)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import dropped_indices
from ckpt_prune.compensation.least_squares import solve
from ckpt_prune.compensation.spectrum import EXACT_WIDTH
from ckpt_prune.measure.moments.inputs import Moments

SLIGHT = 1e-9
"""Least damping, as a share of the mean variance, in place of eigenvalues of a wide singular covariance."""


@dataclass(frozen=True)
class SiteDiagnostics:
    """Errors of one projection, per token, in squared units of its output.

    Attributes:
        uncompensated: J0 = tr(W_D Σ_DD W_Dᵀ) + ‖W_D μ_D‖², the error of dropping and doing nothing.
        floor: J* = tr(W_D Σ_{D|K} W_Dᵀ), the least error that any weights and bias on the kept inputs can reach.
        rho2: 1 − J* / tr(W_D Σ_DD W_Dᵀ), in [0, 1]: the share of the dropped output's variance that the kept inputs
            predict.
    """

    uncompensated: float
    floor: float
    rho2: float


def diagnose(weight: Tensor, moments: Moments, kept: Tensor, *, exact: int = EXACT_WIDTH) -> SiteDiagnostics:
    """Return the `SiteDiagnostics` of keeping the inputs `kept`.

    Args:
        weight: W, (d_out, d), any floating dtype.
        moments: of the full input (d,), with a Gram, on the same device.
        kept: kept input indices, (k,) int64.
        exact: largest number of kept inputs at which a singular covariance is decomposed: 9 k³ flops, minutes at a
            width of 8192. Above it, the covariance is damped by what rounding has added to the eigenvalues of such a
            Gram, at least `SLIGHT`, and the floor comes out a little too high.
    """
    if moments.gram is None:
        raise ValueError("diagnostics need second moments: collect statistics with a Gram")
    dropped = dropped_indices(moments.width, kept)
    mean = moments.mean
    lost = weight[:, dropped].double()
    offset = lost @ mean[dropped]
    rows = moments.gram[dropped]

    def covariance_with(columns: Tensor) -> Tensor:
        """W_D Σ over the dropped rows and `columns`, (d_out, len(columns))."""
        return lost @ (rows[:, columns].double() / moments.count) - offset.outer(mean[columns])

    spread = max(float((covariance_with(dropped) * lost).sum()), 0.0)
    uncompensated = spread + float(offset.square().sum())
    if spread == 0.0:
        return SiteDiagnostics(uncompensated, 0.0, 1.0)
    covariance = moments.gram[kept][:, kept].double().div_(moments.count).sub_(mean[kept].outer(mean[kept]))
    shared = covariance_with(kept)
    # The kept inputs predict W_D Σ_DK Σ_KK⁺ Σ_KD W_Dᵀ. The pseudo-inverse serves where Σ_KK is singular.
    rounding = torch.finfo(moments.gram.dtype).eps
    predicted = _predict(covariance, shared, exact, rounding) if kept.numel() else 0.0
    floor = min(max(spread - predicted, 0.0), spread)
    return SiteDiagnostics(uncompensated, floor, 1.0 - floor / spread)


def _predict(covariance: Tensor, shared: Tensor, exact: int, rounding: float) -> float:
    """Return tr(S Σ⁻¹ Sᵀ), or nearly so; the covariance is overwritten.

    Args:
        covariance: Σ, (k, k) float64, of entries rounded by `rounding` of what they are, or less.
        shared: S, (d_out, k) float64.
        rounding: by random errors of that size a matrix gains eigenvalues of √k times it.
    """
    mean = covariance.diagonal().mean()
    damping, added = max(SLIGHT, rounding * math.sqrt(len(covariance))), 0.0
    while len(covariance) > exact and damping < 1:
        covariance.diagonal().add_((damping - added) * mean)
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if int(failed) == 0:
            return float(torch.linalg.solve_triangular(factor, shared.T, upper=False).square().sum())
        damping, added = 10 * damping, damping
    return float((solve(covariance, shared) * shared).sum())
