"""Sums that a closed form is fitted to, its solution, and the error of a solution.

See compensation/README.md, section 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ckpt_prune.measure.moments.inputs import Moments

CHUNK = 1024
"""Rows of a float32 Gram widened to float64 at a time: 90 MB at a width of 11008, instead of the whole Gram twice."""


@dataclass(frozen=True)
class Fit:
    """Sums over N tokens of the inputs a pruned projection keeps, x (k,), and the outputs it should give, y (d_out,).

    The target y excludes the projection's existing bias, which stays as it is. All tensors are float64. Sums add:
    `total - fold` is the fit of all tokens but those of one fold.

    Attributes:
        count: N, tokens seen.
        sum: Σ x, (k,).
        target_sum: Σ y, (d_out,).
        gram: Σ x xᵀ, (k, k), or None if only the vectors are known.
        cross: Σ y xᵀ, (d_out, k), or None.
        target_energy: Σ ‖y‖², or None.
        rounding: of the second moments' entries, as a share of √(Σ x_i² Σ x_j²): that of the type they were summed in.
    """

    count: int
    sum: Tensor
    target_sum: Tensor
    gram: Tensor | None = None
    cross: Tensor | None = None
    target_energy: float | None = None
    rounding: float = torch.finfo(torch.float64).eps

    def __add__(self, other: "Fit") -> "Fit":
        return self._combine(other, 1)

    def __sub__(self, other: "Fit") -> "Fit":
        return self._combine(other, -1)

    def _combine(self, other: "Fit", sign: int) -> "Fit":
        def tensors(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            return None if a is None or b is None else torch.add(a, b, alpha=sign)

        has_energy = self.target_energy is not None and other.target_energy is not None
        return Fit(
            self.count + sign * other.count,
            torch.add(self.sum, other.sum, alpha=sign),
            torch.add(self.target_sum, other.target_sum, alpha=sign),
            tensors(self.gram, other.gram),
            tensors(self.cross, other.cross),
            (self.target_energy or 0.0) + sign * (other.target_energy or 0.0) if has_energy else None,
            max(self.rounding, other.rounding),
        )

    @property
    def mean(self) -> Tensor:
        """Mean μ of the kept inputs, (k,)."""
        return self.sum / self.count

    @property
    def target_mean(self) -> Tensor:
        """Mean μ_y of the target, (d_out,)."""
        return self.target_sum / self.count

    def second_moments(self) -> tuple[Tensor, Tensor, float]:
        """Return `gram`, `cross` and `target_energy`; refuse a fit that was made from vectors alone."""
        if self.gram is None or self.cross is None or self.target_energy is None:
            raise ValueError("this needs second moments, and the fit has none: collect statistics with a Gram")
        return self.gram, self.cross, self.target_energy

    def shift_origin(self, origin: Tensor, target_origin: Tensor) -> "Fit":
        """Measure the same tokens from other origins: x − `origin` (k,), y − `target_origin` (d_out,)."""
        gram, cross, energy = self.second_moments()
        moved, target_moved = self.sum - self.count * origin, self.target_sum - self.count * target_origin
        moved_gram = gram - torch.outer(self.sum, origin) - torch.outer(origin, moved)
        moved_energy = energy - float(target_origin @ (self.target_sum + target_moved))
        # Sums get smaller, and their rounding stays as it was.
        smaller = float(moved_gram.trace()) * moved_energy
        grown = max(1.0, float(gram.trace()) * energy / smaller) if smaller > 0 else 1.0
        return Fit(
            self.count,
            moved,
            target_moved,
            moved_gram,
            cross - torch.outer(self.target_sum, origin) - torch.outer(target_origin, moved),
            moved_energy,
            self.rounding * math.sqrt(grown),
        )

    def centre(self) -> "Fit":
        """Measure from the tokens' own means: `gram` is G − N μ μᵀ, `cross` C − N μ_y μᵀ, both sums are zero."""
        return self.shift_origin(self.mean, self.target_mean)


@dataclass(frozen=True)
class Blend:
    """Fits of the same tokens to every target from W x to the drift-correcting W x + δ.

    See compensation/README.md, section 4.

    Attributes:
        fit: to W x.
        cross: Σ δ x_Kᵀ, (d_out, k) float64. None without drift: then every target is W x.
        sum: Σ δ, (d_out,) float64, or None.
        energy: Σ ‖δ‖².
        along: Σ δ · W x.
    """

    fit: Fit
    cross: Tensor | None = None
    sum: Tensor | None = None
    energy: float = 0.0
    along: float = 0.0

    def __add__(self, other: "Blend") -> "Blend":
        return self._combine(other, 1)

    def __sub__(self, other: "Blend") -> "Blend":
        return self._combine(other, -1)

    def _combine(self, other: "Blend", sign: int) -> "Blend":
        fit = self.fit._combine(other.fit, sign)
        if self.cross is None or other.cross is None or self.sum is None or other.sum is None:
            return Blend(fit)
        return Blend(
            fit,
            torch.add(self.cross, other.cross, alpha=sign),
            torch.add(self.sum, other.sum, alpha=sign),
            self.energy + sign * other.energy,
            self.along + sign * other.along,
        )

    def at(self, share: float) -> Fit:
        """Return the fit to W x + `share` δ: 0 is the sequential target, 1 the dense model's own residual stream."""
        if share == 0 or self.cross is None or self.sum is None:
            return self.fit
        _, cross, energy = self.fit.second_moments()
        return replace(
            self.fit,
            target_sum=torch.add(self.fit.target_sum, self.sum, alpha=share),
            cross=torch.add(cross, self.cross, alpha=share),
            target_energy=energy + 2 * share * self.along + share * share * self.energy,
        )

    def with_fold(self, fold: Fit, *, centred: bool) -> tuple[Fit, Fit, Tensor | None, Tensor]:
        """Return what scores fits to these tokens on a fold: the fit to W x, the fold, Σ δ xᵀ, and the mean of δ.

        If `centred`, inputs and targets of both are measured from the means of these tokens, so that a bias matches
        them. The target of `fold` is W x + δ if there is drift. The mean of δ is zero without drift or centring.
        """
        seen, drift, drift_mean = self.fit, self.cross, torch.zeros_like(self.fit.target_sum)
        if centred:
            mean, target_mean = seen.mean, seen.target_mean
            if drift is not None and self.sum is not None:
                drift = torch.addr(drift, self.sum, mean, alpha=-1)
                drift_mean = self.sum / seen.count
                target_mean = target_mean + drift_mean
            seen, fold = seen.centre(), fold.shift_origin(mean, target_mean)
        return seen, fold, drift, drift_mean


@dataclass(frozen=True)
class Solution:
    """Weight and bias that replace those of a pruned projection.

    Attributes:
        weight: Ŵ, (d_out, k) float64.
        bias: (d_out,) float64, to ADD to the projection's own bias; None if the method leaves the bias alone.
        details: figures worth a line in a report, such as "scale" or "strength" (absolute, on the scale of Gram sums).
    """

    weight: Tensor
    bias: Tensor | None = None
    details: dict[str, float] = field(default_factory=dict)


def keep_weights(weight_kept: Tensor, fit: Fit) -> Solution:
    """Return W_K as it is."""
    return Solution(weight_kept)


def restore_mean(weight_kept: Tensor, fit: Fit) -> Solution:
    """Return W_K and the bias that restores the mean output, μ_y − W_K μ_K (FLAP, VBP)."""
    return Solution(weight_kept, fit.target_mean - weight_kept @ fit.mean)


def fit_from_moments(weight: Tensor, moments: Moments, kept: Tensor) -> Fit:
    """Fit the dense output y = W x on the kept inputs of the same tokens; without second moments if there is no Gram.

    Args:
        weight: W, (d_out, d), any floating dtype.
        moments: of the full input x (d,), on the same device as `weight`.
        kept: kept input indices, (k,) int64.
    """
    wide = weight.double()
    total, target_sum = moments.sum[kept], wide @ moments.sum
    if moments.gram is None:
        return Fit(moments.count, total, target_sum)
    width, k = wide.shape[1], kept.numel()
    gram = torch.empty(k, k, dtype=torch.float64, device=wide.device)
    cross = torch.empty(wide.shape[0], k, dtype=torch.float64, device=wide.device)
    energy = 0.0
    # tr(W G Wᵀ) needs W G for every column, and C for the kept ones alone. One pass over the rows of the symmetric G
    # gives both, and never makes a float64 copy of all of G.
    for part, rows in _chunks(kept):
        block = moments.gram[rows].double()
        gram[part] = block[:, kept]
        cross[:, part] = wide @ block.T
        energy += float((cross[:, part] * wide[:, rows]).sum())
    for _, rows in _chunks(dropped_indices(width, kept)):
        block = moments.gram[rows].double()
        energy += float(((wide @ block.T) * wide[:, rows]).sum())
    # Rounding of float32 tokens themselves adds its square to sums of any type.
    rounding = max(torch.finfo(moments.gram.dtype).eps, torch.finfo(torch.float32).eps ** 2)
    return Fit(moments.count, total, target_sum, gram, cross, energy, rounding)


def blend_from_moments(weight: Tensor, moments: Moments, kept: Tensor) -> Blend:
    """Blend every target from W x to the drift-correcting one, on the kept inputs; W x alone if there is no drift.

    Args:
        weight: W, (d_out, d), any floating dtype.
        moments: of the full input x (d,), on the same device as `weight`. With a drift they must have a Gram.
        kept: kept input indices, (k,) int64.
    """
    fit = fit_from_moments(weight, moments, kept)
    drift = moments.drift
    if drift is None:
        return Blend(fit)
    along = sum(
        float((cross_rows.double() * weight_rows.double()).sum())
        for cross_rows, weight_rows in zip(torch.split(drift.cross, CHUNK), torch.split(weight, CHUNK), strict=True)
    )
    return Blend(fit, drift.cross[:, kept].double(), drift.sum, drift.energy, along)


def lack_from_moments(weight: Tensor, moments: Moments, kept: Tensor) -> Blend:
    """Blend every target of what W_K x lacks: y − W_K x, which is W_D x_D, and with drift W_D x_D + α δ.

    A fit of Δ to it gives Ŵ = W_K + Δ, and its errors are those of Ŵ. The products are with the dropped inputs alone,
    and no digits cancel, as they do in C − W_K G. Arguments are as in `blend_from_moments`; there must be a Gram.
    """
    assert moments.gram is not None
    dropped = dropped_indices(weight.shape[1], kept)
    lost = weight[:, dropped].double()
    gram = torch.empty(len(kept), len(kept), dtype=torch.float64, device=weight.device)
    for part, rows in _chunks(kept):
        gram[part] = moments.gram.index_select(0, rows).index_select(1, kept)
    cross, energy = torch.zeros(len(weight), len(kept), dtype=torch.float64, device=weight.device), 0.0
    for part, rows in _chunks(dropped):
        block = moments.gram.index_select(0, rows)
        cross.addmm_(lost[:, part], block.index_select(1, kept).double())
        energy += float(((lost @ block.index_select(1, dropped).double().T) * lost[:, part]).sum())
    rounding = max(torch.finfo(moments.gram.dtype).eps, torch.finfo(torch.float32).eps ** 2)
    fit = Fit(moments.count, moments.sum[kept], lost @ moments.sum[dropped], gram, cross, energy, rounding)
    if moments.drift is None:
        return Blend(fit)
    along = float((moments.drift.cross[:, dropped].double() * lost).sum())
    return Blend(fit, moments.drift.cross[:, kept].double(), moments.drift.sum, moments.drift.energy, along)


def complete(lack: Fit, weight_kept: Tensor, *, single: bool = False) -> Fit:
    """Return the fit to y that a fit to y − W_K x makes; if `single`, with its product with the Gram in float32."""
    gram, cross, energy = lack.second_moments()
    forecast = (weight_kept.float() @ gram.float()).double() if single else weight_kept @ gram
    return replace(
        lack,
        target_sum=lack.target_sum + weight_kept @ lack.sum,
        cross=cross + forecast,
        target_energy=energy + float(((2 * cross + forecast) * weight_kept).sum()),
    )


def dropped_indices(width: int, kept: Tensor) -> Tensor:
    """Return the indices below `width` that are not kept, ascending, int64."""
    is_dropped = torch.ones(width, dtype=torch.bool, device=kept.device)
    is_dropped[kept] = False
    return is_dropped.nonzero().squeeze(1)


def _chunks(indices: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, indices.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        yield part, indices[part]


def squared_error(solution: Solution, fit: Fit, *, single: bool = False) -> float:
    """Return Σ ‖y − Ŵ x − b‖² over the tokens of `fit`, from its sums alone; never negative.

    If `single`, products with the Gram are in float32: some 1e-6 of the largest term of the sum is then lost.
    """
    gram, cross, energy = fit.second_moments()
    gram = gram.float() if single else gram
    weight, value = solution.weight, energy
    # At a wide site `none` and `bias` change no weight, and a product with the Gram is most of the work.
    if bool(weight.any()):
        # Some outputs at a time: at a width of 28672 a matrix like the weight takes 1.5 GB.
        for rows, targets in zip(torch.split(weight, CHUNK), torch.split(cross, CHUNK), strict=True):
            value += float(((rows.to(gram.dtype) @ gram - 2 * targets) * rows).sum())
    if solution.bias is not None:
        value += float(solution.bias @ (2 * (weight @ fit.sum - fit.target_sum) + fit.count * solution.bias))
    return max(value, 0.0)
