"""Errors on held-out tokens, in closed form: train on all folds but one, score on that one.

See compensation/README.md, section 5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import Blend, Fit
from ckpt_prune.compensation.least_squares import reciprocals

LEAST = 1e-6
"""The least strength, as a share of the mean eigenvalue. Below it a rank-one inverse cancels too many digits."""


@dataclass(frozen=True)
class FoldScore:
    """Score of every strength and share on one fold: sums in the eigenbasis of the training tokens' Gram.

    The training tokens are those of all other folds. Decomposing their Gram is nearly all of the work. It depends
    neither on λ, nor on the share α of the drift, nor on where the weights shrink to. All tensors are float64, and k
    inputs are kept. Where a bias is fitted, inputs and targets are measured from the means of the training tokens, so
    that the bias drops out.

    Attributes:
        values: eigenvalues v of the training Gram, (k,).
        vectors: its eigenvectors V as columns, (k, k).
        crosses: C V of the training target at α = 0 and, with drift, Σ δ xᵀ V: each (d_out, k).
        gram: Vᵀ G V of the fold, (k, k).
        cross: C V of the fold, whose target is at α = 1, (d_out, k).
        energy: Σ ‖y‖² of the fold's target.
        sum: Vᵀ Σ x of the fold, (k,).
        target_sum: Σ y of the fold, (d_out,).
        count: tokens of the fold.
        drift_mean: mean of δ over the training tokens, (d_out,). The mean restored at α = 1 is that much more than the
            one restored at α = 0. Zero without drift or without a bias.
        lacking: z, (k,): the training Gram is V (diag(v) − z zᵀ) Vᵀ, because the basis is that of inputs measured from
            zero. None if it is the eigenbasis.
    """

    values: Tensor
    vectors: Tensor
    crosses: tuple[Tensor, ...]
    gram: Tensor
    cross: Tensor
    energy: float
    sum: Tensor
    target_sum: Tensor
    count: int
    drift_mean: Tensor
    lacking: Tensor | None = None

    @classmethod
    def of(cls, train: Blend, fold: Fit, *, centred: bool) -> "FoldScore":
        """Prepare to score fits to `train` on `fold`.

        Args:
            train: blend of the training tokens, with second moments.
            fold: fit of other tokens. Its target is at α = 1 where `train` has drift.
            centred: whether a bias is fitted, by matching the training means.
        """
        seen, fold, drift, drift_mean = train.with_fold(fold, centred=centred)
        gram, cross, _ = seen.second_moments()
        fold_gram, fold_cross, energy = fold.second_moments()
        values, vectors = torch.linalg.eigh(gram)
        # At width 11008 each of these is gigabytes.
        del gram, seen
        return cls(
            values,
            vectors,
            tuple(part @ vectors for part in (cross, drift) if part is not None),
            vectors.T @ fold_gram @ vectors,
            fold_cross @ vectors,
            energy,
            vectors.T @ fold.sum,
            fold.target_sum,
            fold.count,
            drift_mean,
        )

    def with_bias(self, train: Blend) -> "FoldScore":
        """Return the scores of fits with a bias, as `of` with `centred`, without another decomposition.

        Measured from the training mean μ of N tokens, their Gram lacks N μ μᵀ. Its inverse differs by the product of
        two vectors (Sherman and Morrison), which takes O(k² + d_out k) for each strength.

        Args:
            train: the blend that this was made with, without `centred`.
        """
        seen, count = train.fit, train.fit.count
        mean, target_mean = seen.mean @ self.vectors, seen.target_mean
        crosses = [torch.addr(self.crosses[0], seen.target_sum, mean, alpha=-1)]
        drift_mean = torch.zeros_like(target_mean)
        if train.sum is not None:
            crosses.append(torch.addr(self.crosses[1], train.sum, mean, alpha=-1))
            drift_mean = train.sum / count
        # Moments of turned inputs are moments like any.
        turned = Fit(self.count, self.sum, self.target_sum, self.gram, self.cross, self.energy)
        fold = turned.shift_origin(mean, target_mean + drift_mean)
        gram, cross, energy = fold.second_moments()
        return replace(
            self,
            crosses=tuple(crosses),
            gram=gram,
            cross=cross,
            energy=energy,
            sum=fold.sum,
            target_sum=fold.target_sum,
            drift_mean=drift_mean,
            lacking=mean * math.sqrt(count),
        )

    def can_add_bias(self, strengths: Sequence[float]) -> bool:
        """Return whether `with_bias` loses no digits that matter under these strengths: none is next to nothing."""
        return min(strengths, default=0.0) > LEAST * float(self.values.mean())

    def errors(self, base: Tensor | None, strengths: Sequence[float], shares: Sequence[float]) -> Tensor:
        """Return Σ ‖y − Ŵ x − b‖² over the fold, for every strength and share.

        Ŵ(λ, α) is what `least_squares.shrink` gives for the training tokens, and b is the bias that fits it.

        Args:
            base: where the weights shrink to as λ grows, (d_out, k) float64; None for zero.
            strengths: absolute, each zero or more.
            shares: α, the share of the drift in the training target; of no effect without drift.

        Returns:
            (len(strengths), len(shares)) float64, never negative. Time O(d_out k²), and O(k²) more for each strength.
        """
        # In the eigenbasis Ŵ − base is Σ_i α^i pull_i with column j divided by v_j + λ. The error is quadratic in Ŵ.
        # So for each λ it is a quadratic form in (1, α), and its coefficients are quadratic forms in the 1 / (v_j + λ).
        first, residual, start = self.crosses[0], self.cross, self.energy
        reached = torch.zeros_like(self.target_sum)
        if base is not None:
            turned = base @ self.vectors
            forecast = turned @ self.gram
            start += float(((forecast - 2 * self.cross) * turned).sum())
            first, residual, reached = first - turned * self.values, residual - forecast, turned @ self.sum
            if self.lacking is not None:
                first = torch.addr(first, turned @ self.lacking, self.lacking)
        pulls = (first, *self.crosses[1:])
        scales = torch.stack([reciprocals(self.values + strength) for strength in strengths], 1)
        share = torch.tensor(list(shares), dtype=torch.float64, device=scales.device)
        total = torch.full((scales.shape[1], share.numel()), start, dtype=torch.float64, device=scales.device)
        # The bias restores the training mean of the target at α. That mean is short of the one at α = 1 by (1 − α) gap.
        gap, lack = self.drift_mean, 1 - share
        total += 2 * lack * (gap @ (self.target_sum - reached)) + self.count * lack.square() * (gap @ gap)
        rank_one = None if self.lacking is None else _RankOne.of(self.lacking, scales, self.gram, pulls)
        for i, pull in enumerate(pulls):
            slope = (pull * residual).sum(0) @ scales
            tilt = (pull.T @ gap * self.sum) @ scales
            if rank_one is not None:
                slope += rank_one.product(i, residual @ rank_one.u)
                tilt += rank_one.product(i, torch.outer(gap, self.sum @ rank_one.u))
            total -= 2 * torch.outer(slope, share**i) + 2 * torch.outer(tilt, lack * share**i)
            for j, other in enumerate(pulls[: i + 1]):
                curve = (pull.T @ other).mul_(self.gram)
                bend = (scales * (curve @ scales)).sum(0)
                if rank_one is not None:
                    bend += rank_one.square(i, j)
                total += (1 if i == j else 2) * torch.outer(bend, share ** (i + j))
        return total.clamp_min(0)


@dataclass(frozen=True)
class _RankOne:
    """Difference r u uᵀ of (diag(v + λ) − z zᵀ)⁻¹ and R = diag(v + λ)⁻¹, for every λ.

    u = R z and r = 1 / (1 − z·u).

    Attributes:
        u: u, (k, strengths).
        rate: r, (strengths,).
        along: P u of every pull P: each (d_out, strengths).
        across: P R Q u, with Q the fold's Gram.
        height: u·Q u, (strengths,).
    """

    u: Tensor
    rate: Tensor
    along: tuple[Tensor, ...]
    across: tuple[Tensor, ...]
    height: Tensor

    @classmethod
    def of(cls, lacking: Tensor, scales: Tensor, gram: Tensor, pulls: Sequence[Tensor]) -> "_RankOne":
        """Make it from z, 1 / (v + λ) as columns, Q and the pulls."""
        u = scales * lacking[:, None]
        seen = gram @ u
        return cls(
            u,
            1 / (1 - lacking @ u),
            tuple(pull @ u for pull in pulls),
            tuple(pull @ (scales * seen) for pull in pulls),
            (u * seen).sum(0),
        )

    def product(self, index: int, other: Tensor) -> Tensor:
        """Return r Σ (P u) ∘ `other`, (strengths,)."""
        return self.rate * (self.along[index] * other).sum(0)

    def square(self, i: int, j: int) -> Tensor:
        """Return tr(P_i H Q H P_jᵀ) − tr(P_i R Q R P_jᵀ), H being the whole inverse: (strengths,)."""
        crossed = self.along[i] * self.across[j] + self.across[i] * self.along[j]
        return self.rate * (crossed.sum(0) + self.rate * self.height * (self.along[i] * self.along[j]).sum(0))
