"""Find the strength of a wide ridge on held-out tokens by a few Cholesky factors, without eigenvectors.

See compensation/README.md, section 5.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import Blend, Fit
from ckpt_prune.compensation.least_squares import solve
from ckpt_prune.compensation.methods import Method, Units, absolute_strength

OUTPUTS = 128
"""Outputs that strengths are compared on: random orthonormal mixtures of all, the same for every strength and fold."""
SMALLEST_PIVOT = 1e-4
"""Relative to its entry of the diagonal: with a smaller one float32 has too few digits for a factor."""


@dataclass(frozen=True)
class RidgeErrors:
    """Sums of one training set and one held-out fold that score a ridge at any strength, in O(k³ / 3 + d_out k²).

    Where a bias is fitted, inputs and targets are measured from the means of the training tokens.

    Attributes:
        gram: G of the training tokens, (k, k).
        pulls: C − base G of the training target at α = 0 and, with drift, Σ δ xᵀ: each (d_out, k).
        fold_gram: G of the fold, (k, k).
        residual: C − base G of the fold, whose target is at α = 1, (d_out, k).
        energy: Σ ‖y − base x‖² of the fold.
        sum: Σ x of the fold, (k,).
        target_sum: Σ (y − base x) of the fold, (d_out,).
        count: tokens of the fold.
        drift_mean: mean of δ over the training tokens, (d_out,); zero without drift or without a bias.
        single: solve in float32 where that has digits enough.
    """

    gram: Tensor
    pulls: tuple[Tensor, ...]
    fold_gram: Tensor
    residual: Tensor
    energy: float
    sum: Tensor
    target_sum: Tensor
    count: int
    drift_mean: Tensor
    single: bool = False

    @classmethod
    def of(cls, train: Blend, fold: Fit, base: Tensor | None, *, centred: bool) -> "RidgeErrors":
        """Prepare to score ridges towards `base` (None for zero), fitted to `train`, on `fold`; both float64."""
        seen, fold, drift, drift_mean = train.with_fold(fold, centred=centred)
        gram, cross, _ = seen.second_moments()
        fold_gram, residual, energy = fold.second_moments()
        target_sum = fold.target_sum
        if base is not None:
            forecast = base @ fold_gram
            energy += float(((forecast - 2 * residual) * base).sum())
            cross, residual = cross - base @ gram, residual - forecast
            target_sum = target_sum - base @ fold.sum
        pulls = (cross,) if drift is None else (cross, drift)
        return cls(gram, pulls, fold_gram, residual, energy, fold.sum, target_sum, fold.count, drift_mean)

    def mix(self, mixture: Tensor) -> "RidgeErrors":
        """Return the same for mixtures (m, d_out) of the outputs but for `energy`, to be solved in float32."""
        return replace(
            self,
            pulls=tuple(mixture @ pull for pull in self.pulls),
            residual=mixture @ self.residual,
            target_sum=mixture @ self.target_sum,
            drift_mean=mixture @ self.drift_mean,
            single=True,
        )

    def at(self, strength: float, shares: Sequence[float]) -> Tensor:
        """Return Σ ‖y − Ŵ x − b‖² over the fold for every share α of the drift, (shares,) float64.

        Of mixtures it is that up to a constant. Ŵ is what `least_squares.shrink` gives for the training tokens, and b
        the bias that fits it.
        """
        steps = self._solve(strength).chunk(len(self.pulls))
        share = torch.tensor(list(shares), dtype=torch.float64)
        gap, lack = self.drift_mean, 1 - share
        total = self.energy + 2 * lack * float(gap @ self.target_sum) + self.count * lack.square() * float(gap @ gap)
        for i, step in enumerate(steps):
            seen = step @ self.fold_gram.to(step.dtype)
            along, tilt = float((step * self.residual).sum()), float(gap @ (step.double() @ self.sum))
            total -= 2 * share**i * (along + lack * tilt)
            for j, other in enumerate(steps[: i + 1]):
                total += (1 if i == j else 2) * share ** (i + j) * float((seen * other).sum(dtype=torch.float64))
        return total

    def _solve(self, strength: float) -> Tensor:
        """Return the pulls times (G + λI)⁻¹, one below the other."""
        pulls, matrix = torch.cat(self.pulls), self.gram.clone()
        matrix.diagonal().add_(strength)
        if self.single:
            factor, failed = torch.linalg.cholesky_ex(matrix.float())
            pivots = factor.diagonal().square() / matrix.diagonal()
            if int(failed) == 0 and bool(pivots.amin() > SMALLEST_PIVOT):
                solution: Tensor = torch.cholesky_solve(pulls.T.float(), factor).T
                return solution
        return solve(matrix, pulls)


@cache
def mixture_of(outputs: int) -> Tensor | None:
    """Return `OUTPUTS` random mixtures of outputs, orthogonal rows of length √(d_out / m); None if there are few."""
    if outputs <= 2 * OUTPUTS:
        return None
    generator = torch.Generator().manual_seed(0)
    rows: Tensor = torch.linalg.qr(torch.randn(outputs, OUTPUTS, dtype=torch.float64, generator=generator)).Q.T
    return rows.mul_((outputs / OUTPUTS) ** 0.5)


@dataclass
class StrengthWalk:
    """Walks downhill from the middle of a grid to the strength of least held-out error of one ridge.

    The first fold is walked down. The others are scored beside its best strength alone; if the sum over folds is least
    at an end of what was scored, the folds are gone through again further on. All this is in float32 on mixtures of the
    outputs, if there are many. At the best strength errors are those of all outputs, in float64.

    Args:
        method: a ridge.
        weight_kept: W_K, (d_out, k) float64.
        grid: strengths, ascending.
        shares: of the drift, ascending.
        units: of the grid.
    """

    method: Method
    weight_kept: Tensor
    grid: Sequence[float]
    shares: Sequence[float]
    units: Units
    best: int | None = None
    rough: dict[int, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    exact: dict[int, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def see(self, number: int, train: Blend, fold: Fit) -> None:
        """Score the fold of that number, the first of which is 0, by fits to its training tokens."""
        base = self.weight_kept if self.method.ridge_towards == "kept" else None
        whole = RidgeErrors.of(train, fold, base, centred=self.method.adds_bias)
        mixture = mixture_of(len(self.weight_kept))
        mixed = whole if mixture is None else whole.mix(mixture.to(self.weight_kept.device))
        strengths = [absolute_strength(value, self.units, train.fit) for value in self.grid]

        def score(index: int) -> float:
            if number not in self.rough[index]:
                self.rough[index][number] = mixed.at(strengths[index], self.shares)
            return float(self.rough[index][number].min())

        if self.best is None:
            index, following = len(self.grid) // 2, -1
            while index != following:
                following, index = index, min(self._around(index), key=lambda at: (score(at), -at))
            self.best = index
        for index in self._around(self.best):
            score(index)
        self.exact[self.best][number] = whole.at(strengths[self.best], self.shares).clamp_min(0)

    def move(self, folds: int) -> bool:
        """Go to the strength of least sum over so many folds, and say whether these must be gone through again."""
        complete = {index: sum(of_fold.values()) for index, of_fold in self.rough.items() if len(of_fold) == folds}
        self.best = min(complete, key=lambda index: (float(torch.as_tensor(complete[index]).min()), -index))
        return len(self.exact[self.best]) < folds or not complete.keys() >= set(self._around(self.best))

    def _around(self, index: int) -> range:
        return range(max(index - 1, 0), min(index + 2, len(self.grid)))

    def errors(self) -> dict[tuple[str, float | None, float], float]:
        """Return the sum over folds at the best strength: method, strength and share → error."""
        assert self.best is not None
        total = torch.stack(list(self.exact[self.best].values())).sum(0).tolist()
        return {(self.method.name, self.grid[self.best], share): e for share, e in zip(self.shares, total, strict=True)}
