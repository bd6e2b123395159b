"""How far the inputs of one text are from those of another, and what bounds the error there (CORP, Proposition C.1.3).

With Σ, μ of the calibration tokens and Σ', μ' of others, W_P the columns that go and S the inputs that stay, the error
of an affine fit on the others is at most, up to constants that the paper leaves open,

    2 J'* + ‖W_P‖_F² R⁴ |S| log(|S| / δ) / (σ² N) + ‖W_P‖_F² (‖Σ − Σ'‖₂ + ‖μ − μ'‖²),

σ being the least eigenvalue of Σ_SS + λ, N the calibration tokens and R a bound of ‖x‖. Here the constants are one,
δ is `DELTA`, and R² is the mean ‖x‖² of the tokens that were seen: moments know no more.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt_prune.compensation.diagnostics import diagnose
from ckpt_prune.compensation.least_squares import solve
from ckpt_prune.compensation.methods import Method
from ckpt_prune.measure.moments.inputs import Moments

DELTA = 0.05
"""Probability with which the bound may fail."""


@dataclass(frozen=True)
class Shift:
    """One site whose units were chosen and fitted on some tokens, on others.

    Errors are per token in squared units of a projection's output, or per sample in squared logits (`head_shift`).

    Attributes:
        uncompensated: error on the others of dropping and doing nothing.
        floor: J'*, the least error there that any weights and bias on the kept inputs can reach.
        energy: E'‖W x‖², what relative errors are shares of.
        covariances: ‖Σ − Σ'‖₂ / ‖Σ‖₂. None, as what follows from it, where spectra are not asked for.
        means: ‖μ − μ'‖² / E‖x‖².
        smallest: σ, the least eigenvalue of Σ_SS + λ, as a share of the mean diagonal entry of Σ_SS.
        sampling: the bound's second term; infinite where σ is 0. None where no bound is known.
        shifting: its third term.
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
        """All three terms."""
        if self.sampling is None or self.shifting is None:
            return None
        return 2 * self.floor + self.sampling + self.shifting


def measure_shift(
    weight: Tensor, calibration: Moments, others: Moments, kept: Tensor, strength: float, *, spectra: bool = True
) -> Shift:
    """What is known of a projection on other tokens than it was fitted on.

    Args:
        weight: W, (d_out, d), any floating dtype.
        calibration: of its input (d,), with a Gram, on the same device.
        others: the same of the other tokens.
        kept: inputs that stay, (k,) int64, k >= 1.
        strength: λ, absolute, on the scale of the calibration's Gram sums.
        spectra: whether to look for eigenvalues, which takes d³.

    Raises:
        ValueError: one of the moments has no Gram.
    """
    found = diagnose(weight, others, kept)
    if calibration.gram is None or others.gram is None:
        raise ValueError("how far inputs are apart needs second moments: collect statistics with a Gram")
    w, apart = weight.double(), float((calibration.mean - others.mean).square().sum())
    square = float(calibration.energy.sum())
    told = Shift(
        uncompensated=found.uncompensated,
        floor=found.floor,
        energy=float((w @ others.gram.double() * w).sum()) / others.count,
        means=apart / square if square > 0 else math.inf,
    )
    if not spectra:
        return told
    own, theirs = (_covariance(each) for each in (calibration, others))
    gone = torch.ones(calibration.width, dtype=torch.bool, device=kept.device)
    gone[kept] = False
    lost = float(w[:, gone].square().sum())
    diagonal = float(own.diagonal()[kept].mean())
    least = float(torch.linalg.eigvalsh(own[kept][:, kept])[0].clamp_min(0)) + strength / calibration.count
    gap, norm = float(torch.linalg.eigvalsh(own - theirs).abs().max()), float(torch.linalg.eigvalsh(own)[-1])
    spread = square**2 * len(kept) * math.log(len(kept) / DELTA) / calibration.count
    return replace(
        told,
        covariances=gap / norm if norm > 0 else math.inf,
        smallest=least / diagonal if diagonal > 0 else 0.0,
        sampling=lost * spread / least**2 if least > 0 else math.inf,
        shifting=lost * (gap + apart),
    )


def _covariance(moments: Moments) -> Tensor:
    """Σ, (d, d) float64."""
    assert moments.gram is not None
    return (moments.gram.double() / moments.count).sub_(moments.mean.outer(moments.mean))


def degrees_of_freedom(method: Method, outputs: int, calibration: Moments, kept: Tensor, strength: float) -> float:
    """Degrees of freedom of a compensation (RCPU, section 4.2): how many numbers of the result it is free to choose.

    Of ridge regression they are the effective ones, d_out tr(G (G + λ I)⁻¹) (Hastie et al. 2001), with G centred, and
    the d_out numbers of the bias beside them, where it adds one. All other forms are counted by their numbers.

    Args:
        method: the compensation.
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
