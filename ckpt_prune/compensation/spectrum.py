"""Number of directions that the inputs of a projection really use (CORP Table 9)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.measure.moments.inputs import Moments

_HELD = 0.95
# A share of the variance that rounding may take away: 19 of 20 equal directions hold 95 %, not "almost".
_SLACK = 1e-9
# Below this share of Σ x² the variance is what float64 sums lose in cancellation: the inputs are constant.
_CONSTANT = 1e-12
EXACT_WIDTH = 4096
"""Up to so many inputs every eigenvalue is found; of more the largest `SKETCH`, at random."""
SKETCH = 512
ITERATIONS = 3


@dataclass(frozen=True)
class Spectrum:
    """Figures of the centred covariance Σ of d inputs. Ranks are 0 if nothing varies.

    Attributes:
        effective_rank: exp(−Σ pᵢ log pᵢ) of the eigenvalues as shares p of their sum (Roy and Vetterli, 2007), in [1,
            d].
        k95: the least number of leading eigenvalues that hold 95 % of the sum of all, in [1, d].
        k95_inputs: the least number of inputs whose variances hold 95 % of the sum of all, in [1, d]; never below k95.
        active: mean over inputs of the share of tokens on which an input is active, in [0, 1].
    """

    effective_rank: float
    k95: int
    k95_inputs: int
    active: float


def spectrum(moments: Moments, *, exact: int = EXACT_WIDTH, sketch: int = SKETCH) -> Spectrum:
    """Return the `Spectrum` of the inputs of one projection.

    CORP's Table 9 names "effective rank" without a definition and "activation sparsity" without a threshold. Here the
    effective rank is Roy and Vetterli's. The text calls k95 a number of channels and the table's caption one of the
    covariance, so both are here. Sparsity would be 1 − active, with the threshold of the statistics. The
    table's sparsities after GELU need a larger one than the default, since GELU is almost never that near to zero.

    A Gram in float32 rounds at 1e-7 of its largest entries: smaller eigenvalues are rounding. Negative ones count as
    zero.

    Args:
        moments: of the full input (d,), with a Gram. The work is O(d³) in float64, on the Gram's device.
        exact: largest number of inputs at which all eigenvalues are found. Above it the largest ones are found by
            `leading`, in O(d² sketch), and the rest of the trace is shared out evenly. The effective rank is then a
            little too large, and k95 exact if it is less than `sketch`.
        sketch: how many eigenvalues `leading` finds.
    """
    if moments.gram is None:
        raise ValueError("a spectrum needs second moments: collect statistics with a Gram")
    if moments.count == 0:
        raise ValueError("a spectrum needs at least one token")
    active = float((moments.active / moments.count).mean())
    if float(moments.variance.sum()) <= _CONSTANT * float(moments.energy.sum()):
        return Spectrum(0.0, 0, 0, active)
    mean = moments.mean
    # N Σ: shares do not depend on the factor.
    scatter = torch.addr(moments.gram.double(), mean, mean, alpha=-moments.count)
    if len(scatter) > exact:
        values = leading(scatter, sketch)
        others = len(scatter) - len(values)
        mean_of_others = (float(scatter.trace()) - float(values.sum())) / others
        values = torch.cat([values, values.new_full((others,), max(0.0, mean_of_others))])
    else:
        values = torch.linalg.eigvalsh(scatter).flip(0).clamp_min_(0)
    shares = values / values.sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    variances = moments.variance.sort(descending=True).values
    return Spectrum(math.exp(entropy), _count_holding(shares), _count_holding(variances / variances.sum()), active)


def _count_holding(shares: Tensor) -> int:
    """Count the first of shares, descending, that hold 95 % of all."""
    return int((shares.cumsum(0) < _HELD - _SLACK).sum()) + 1


def leading(matrix: Tensor, count: int) -> Tensor:
    """Return the largest eigenvalues of a positive semidefinite matrix, by randomised subspace iteration.

    (count,) float64, descending, none negative, of a matrix (d, d) float64. Halko, Martinsson and Tropp 2011,
    Algorithms 4.4 and 5.3, with a fixed seed. They are Ritz values: none is above the true one.
    """
    size = len(matrix)
    wide = min(size, count + max(10, count // 4))  # more directions than are asked for: the last ones come out worst
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(size, wide, generator=generator, dtype=matrix.dtype).to(matrix.device)
    basis = torch.linalg.qr(matrix @ drawn).Q
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix @ basis).Q
    values: Tensor = torch.linalg.eigvalsh(basis.T @ matrix @ basis)
    return values.flip(0)[:count].clamp_min(0)
