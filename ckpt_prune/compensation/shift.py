"""Distance between the inputs of two texts, and the bound on the error that follows (CORP, Proposition C.1.3).

Let Σ and μ be those of the calibration tokens and Σ' and μ' those of others. Let W_P be the columns that go, and S the
inputs that stay. Up to constants that the paper leaves open, the error of an affine fit on the others is at most

    2 J'* + ‖W_P‖_F² R⁴ |S| log(|S| / δ) / (σ² N) + ‖W_P‖_F² (‖Σ − Σ'‖₂ + ‖μ − μ'‖²).

σ is the least eigenvalue of Σ_SS + λ, N the number of calibration tokens and R a bound of ‖x‖. Here the constants are
one, δ is `DELTA`, and R² is the mean ‖x‖² of the tokens that were seen: moments know no more.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt_prune.compensation.diagnostics import diagnose
from ckpt_prune.compensation.fit import dropped_indices
from ckpt_prune.compensation.least_squares import solve
from ckpt_prune.compensation.methods import Method
from ckpt_prune.measure.moments.inputs import Moments

DELTA = 0.05
"""Probability with which the bound may fail."""


@dataclass(frozen=True)
class Shift:
    """Errors of one site on other tokens than its units were chosen and fitted on.

    Errors are per token in squared units of a projection's output, or per sample in squared logits (`head_shift`).

    Attributes:
        uncompensated: error on the others of dropping and doing nothing.
        floor: J'*, the least error there that any weights and bias on the kept inputs can reach.
        energy: E'‖W x‖²: relative errors are shares of it.
        covariances: ‖Σ − Σ'‖₂ / ‖Σ‖₂. None, as everything below, if spectra are not computed.
        means: ‖μ − μ'‖² / E‖x‖².
        smallest: σ, the least eigenvalue of Σ_SS + λ, as a share of the mean diagonal entry of Σ_SS.
        sampling: the bound's second term; infinite if σ is 0. None if no bound is known.
        shifting: the third term of the bound, of how far inputs are apart.
    """

    uncompensated: float
    floor: float
    energy: float
    means: float
    covariances: float | None = None
    smallest: float | None = None
    sampling: float | None = None
    shifting: float | None = None

    @property
    def bound(self) -> float | None:
        """The sum of all three terms."""
        if self.sampling is None or self.shifting is None:
            return None
        return 2 * self.floor + self.sampling + self.shifting


def measure_shift(
    weight: Tensor, calibration: Moments, others: Moments, kept: Tensor, strength: float, *, spectra: bool = True
) -> Shift:
    """Measure how a projection does on other tokens than it was fitted on.

    Args:
        weight: W, (d_out, d), any floating dtype.
        calibration: of its input (d,), with a Gram, on the same device.
        others: of the other tokens.
        kept: inputs that stay, (k,) int64, k >= 1.
        strength: λ, absolute, on the scale of the calibration's Gram sums.
        spectra: whether to compute eigenvalues, which takes d³.
    """
    diagnostics = diagnose(weight, others, kept)
    if calibration.gram is None or others.gram is None:
        raise ValueError("how far inputs are apart needs second moments: collect statistics with a Gram")
    wide, mean_distance = weight.double(), float((calibration.mean - others.mean).square().sum())
    square = float(calibration.energy.sum())
    measured = Shift(
        uncompensated=diagnostics.uncompensated,
        floor=diagnostics.floor,
        energy=float((wide @ others.gram.double() * wide).sum()) / others.count,
        means=mean_distance / square if square > 0 else math.inf,
    )
    if not spectra:
        return measured
    covariance, other_covariance = (_covariance(moments) for moments in (calibration, others))
    dropped_energy = float(wide[:, dropped_indices(calibration.width, kept)].square().sum())
    diagonal = float(covariance.diagonal()[kept].mean())
    least = float(torch.linalg.eigvalsh(covariance[kept][:, kept])[0].clamp_min(0)) + strength / calibration.count
    gap, norm = (
        float(torch.linalg.eigvalsh(covariance - other_covariance).abs().max()),
        float(torch.linalg.eigvalsh(covariance)[-1]),
    )
    spread = square**2 * len(kept) * math.log(len(kept) / DELTA) / calibration.count
    return replace(
        measured,
        covariances=gap / norm if norm > 0 else math.inf,
        smallest=least / diagonal if diagonal > 0 else 0.0,
        sampling=dropped_energy * spread / least**2 if least > 0 else math.inf,
        shifting=dropped_energy * (gap + mean_distance),
    )


def _covariance(moments: Moments) -> Tensor:
    assert moments.gram is not None
    return (moments.gram.double() / moments.count).sub_(moments.mean.outer(moments.mean))


def degrees_of_freedom(method: Method, outputs: int, calibration: Moments, kept: Tensor, strength: float) -> float:
    """Count the numbers of the result that a compensation is free to choose (RCPU, section 4.2).

    For ridge regression they are the effective ones, d_out tr(G (G + λ I)⁻¹) (Hastie et al. 2001), with G centred and
    the d_out numbers of the bias added if there is one. All other forms are counted by their numbers.

    Args:
        outputs: of the projection, d_out.
        calibration: moments that it is fitted to, of the projection's input (d,).
        kept: inputs that stay, (k,) int64, on the same device.
        strength: λ, absolute, on the scale of the calibration's Gram sums.
    """
    if method.freedom is not None:
        return method.freedom(outputs, len(kept))
    bias = outputs * method.adds_bias
    if method.ridge_towards is None or calibration.gram is None:
        return outputs * len(kept) + bias
    gram = calibration.gram[kept][:, kept].double()
    if method.adds_bias:
        gram.addr_(calibration.mean[kept], calibration.sum[kept], alpha=-1)
    penalised = gram.clone()
    penalised.diagonal().add_(strength)
    return outputs * float(solve(penalised, gram).diagonal().sum()) + bias
