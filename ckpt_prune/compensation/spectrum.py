"""How many directions the inputs of a projection really use (CORP Table 9)."""

import math
from dataclasses import dataclass

import torch

from ckpt_prune.calibration.moments import Moments

_HELD = 0.95
# A share of the variance that rounding may take away: 19 of 20 equal directions hold 95 %, not "almost".
_SLACK = 1e-9
# Below this share of Σ x² the variance is what float64 sums lose in cancellation: the inputs are constant.
_CONSTANT = 1e-12


@dataclass(frozen=True)
class Spectrum:
    """Figures of the centred covariance Σ of d inputs.

    Attributes:
        effective_rank: exp(−Σ pᵢ log pᵢ) of the eigenvalues as shares p of their sum (Roy and Vetterli, 2007), in
            [1, d]; 0 where nothing varies.
        k95: the least number of leading eigenvalues that hold 95 % of the sum of all, in [1, d]; 0 where nothing
            varies.
        active: mean over inputs of the share of tokens on which an input is active, in [0, 1].
    """

    effective_rank: float
    k95: int
    active: float


def spectrum(moments: Moments) -> Spectrum:
    """`Spectrum` of the inputs of one projection.

    CORP's Table 9 names "effective rank" without a definition and "activation sparsity" without a threshold. Here the
    effective rank is Roy and Vetterli's. Sparsity would be 1 − active, with `ACTIVE_THRESHOLD`. The table's sparsities
    after GELU need a larger threshold, since GELU is almost never that near to zero.

    The Gram is kept in float32. Where the means are far larger than the deviations, the smallest eigenvalues are
    rounding. Negative eigenvalues count as zero.

    Args:
        moments: of the full input (d,), with a Gram. The work is O(d³) in float64, on the Gram's device.

    Raises:
        ValueError: `moments` has no Gram, or no tokens.
    """
    if moments.gram is None:
        raise ValueError("a spectrum needs second moments: collect statistics with a Gram")
    if moments.count == 0:
        raise ValueError("a spectrum needs at least one token")
    active = float((moments.active / moments.count).mean())
    if float(moments.variance.sum()) <= _CONSTANT * float(moments.energy.sum()):
        return Spectrum(0.0, 0, active)
    mean = moments.mean
    # N Σ: shares do not depend on the factor.
    scatter = torch.addr(moments.gram.double(), mean, mean, alpha=-moments.count)
    values = torch.linalg.eigvalsh(scatter).flip(0).clamp_min_(0)
    shares = values / values.sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    short = (shares.cumsum(0) < _HELD - _SLACK).sum()
    return Spectrum(math.exp(entropy), int(short) + 1, active)
