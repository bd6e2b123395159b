"""Distance between the logits of two texts, and the bound on the error that follows (CORP, Proposition C.2.3).

Let G and h be those of the equations that the compensation of a head solves (CORP eq. 78-79) over N calibration
samples, and G' and h' those over N' others. Up to constants that the paper leaves open, the error of the fit on a
sample of the others is at most

    2 J'* + R⁴ n log(d / δ) / (σ² N) + ‖G/N − G'/N'‖₂ + ‖h/N − h'/N'‖².

There are n = d'² unknowns and d = d' kept dimensions. For the factors of rotary pairs, whose equations have the same
form, n = d = 2 P'. σ is the least eigenvalue of (G + λ) / N. Here the constants are one, and δ is `shift.DELTA`. R⁴ is
the largest mean over samples of ‖q_i‖² ‖k_j‖², where i and j are dimensions of a head, or that of a pair's part of the
squared logits: moments know no more. The terms have different units, as in the paper; heads are summed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt_prune.compensation.logit import LogitSystem
from ckpt_prune.compensation.rotary import RotarySystem
from ckpt_prune.compensation.shift import DELTA, Shift
from ckpt_prune.compensation.spectrum import EXACT_WIDTH
from ckpt_prune.measure.moments.logits import LogitMoments, packed_positions
from ckpt_prune.measure.moments.rotary import RotaryMoments


@dataclass(frozen=True)
class HeadEquations:
    """Equations that the compensation of H heads solves, summed over samples, float64.

    Attributes:
        samples: N.
        normal: head → its G, (n, n).
        rhs: h of every head, (H, n).
        dropped_energy: the error without compensation, (H,).
        energy: of the whole logits, (H,).
        radius: R⁴, (H,).
        dimensions: d.
    """

    samples: int
    normal: Callable[[int], Tensor]
    rhs: Tensor
    dropped_energy: Tensor
    energy: Tensor
    radius: Tensor
    dimensions: int

    @classmethod
    def of_logits(cls, moments: LogitMoments, system: LogitSystem) -> "HeadEquations":
        """Take the equations of CORP's M from moments of q and k, and their system at the kept dimensions."""
        size = system.kept.head_dim
        every = torch.eye(size**2, dtype=torch.float64, device=system.rhs.device).view(-1, size, size)
        diagonal = packed_positions(moments.head_dim, moments.device).diagonal()
        if moments.fourth is not None:
            products = moments.fourth[:, diagonal][:, :, diagonal].double()
        else:
            queries, keys = (gram[..., diagonal].double() for gram in moments.grams())
            products = queries.mT @ keys
        return cls(
            moments.samples,
            lambda head: system.operator(head)(every).flatten(1),
            system.rhs.flatten(1),
            system.dropped_energy,
            system.energy,
            products.flatten(1).amax(1) / moments.samples,
            size,
        )

    @classmethod
    def of_pairs(cls, moments: RotaryMoments, system: RotarySystem) -> "HeadEquations":
        """Take the equations of the factors of rotary pairs from moments, and their system at the pairs that stay."""
        return cls(
            moments.samples,
            system.normal.__getitem__,
            system.rhs,
            system.dropped_energy,
            system.energy,
            moments.gram.diagonal(dim1=1, dim2=2).amax(1) / moments.samples,
            system.rhs.shape[1],
        )

    @property
    def narrow(self) -> bool:
        """Whether eigenvalues of all heads take no longer than those of one projection of `EXACT_WIDTH` inputs."""
        heads, unknowns = self.rhs.shape
        return heads * unknowns**3 <= EXACT_WIDTH**3


def measure_head_shift(
    calibration: HeadEquations, others: HeadEquations, floor: Tensor, strength: Tensor | None
) -> Shift:
    """Measure how a site of attention logits does on other samples than it was fitted on.

    In the result, `covariances` is Σ ‖G/N − G'/N'‖₂ / Σ ‖G/N‖₂ over heads, and `means` Σ ‖h/N − h'/N'‖² / Σ ‖h/N‖².
    `smallest` is the least σ of any head, as a share of the mean diagonal entry of its G/N. Eigenvalues are left out if
    heads are not `narrow`.

    Args:
        calibration: of the samples it was fitted on.
        others: of the other samples.
        floor: Σ J'* over these, of every head, (H,).
        strength: λ of every head, (H,), absolute, on the scale of sums over samples; None if no bound is known, because
            the fit does not solve these equations.
    """
    count = others.samples
    right = calibration.rhs / calibration.samples
    apart = (right - others.rhs / count).square().sum(1)
    size = float(right.square().sum())
    measured = Shift(
        uncompensated=float(others.dropped_energy.sum()) / count,
        floor=float(floor.sum()) / count,
        energy=float(others.energy.sum()) / count,
        means=float(apart.sum()) / size if size > 0 else math.inf,
    )
    if not calibration.narrow:
        return measured
    gap = norm = sampling = 0.0
    shares = []
    unknowns = right.shape[1]
    for head in range(len(right)):
        normal = calibration.normal(head) / calibration.samples
        values = torch.linalg.eigvalsh(normal)
        norm += float(values[-1])
        gap += float(torch.linalg.eigvalsh(normal - others.normal(head) / count).abs().max())
        if strength is None:
            continue
        least = float(values[0].clamp_min(0) + strength[head] / calibration.samples)
        diagonal = float(normal.diagonal().mean())
        shares.append(least / diagonal if diagonal > 0 else 0.0)
        spread = unknowns * math.log(calibration.dimensions / DELTA) / calibration.samples
        sampling += float(calibration.radius[head]) * spread / least**2 if least > 0 else math.inf
    measured = replace(measured, covariances=gap / norm if norm > 0 else math.inf)
    if strength is None:
        return measured
    return replace(measured, smallest=min(shares), sampling=sampling, shifting=gap + float(apart.sum()))
