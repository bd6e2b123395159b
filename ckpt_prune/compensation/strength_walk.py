"""Find the strength of a wide ridge on held-out tokens by a few Cholesky factors, without eigenvectors.

See compensation/README.md, section 5.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import Blend, Fit, Solution, squared_error
from ckpt_prune.compensation.least_squares import solve
from ckpt_prune.compensation.methods import Method, Units, absolute_strength, derive_strength
from ckpt_prune.sparsity.damping import single_cholesky

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
        """Return the same for mixtures (m, d_out) of the outputs but for `energy`, to be solved in float32.

        So where the base is what is compared, an error is exact but for an estimate of the gain on the base.
        """
        return replace(
            self,
            pulls=tuple(mixture @ pull for pull in self.pulls),
            residual=mixture @ self.residual,
            target_sum=mixture @ self.target_sum,
            drift_mean=mixture @ self.drift_mean,
            single=True,
        )

    def towards(self, share: float) -> "RidgeErrors":
        """Return the same for one share of the drift alone: half of the work, to be asked for that share only."""
        if len(self.pulls) == 1:
            return self
        plain, drift = self.pulls
        return replace(self, pulls=(torch.add(plain, drift, alpha=share),))

    def at(self, strength: float, shares: Sequence[float], factor: Tensor | None = None) -> Tensor:
        """Return Σ ‖y − Ŵ x − b‖² over the fold for every share α of the drift, (shares,) float64.

        For mixtures a constant is left out. Ŵ is what `least_squares.shrink` gives for the training tokens, and b the
        bias that fits it. `factor` is what the method of that name returns for this strength.
        """
        steps = self._solve(strength, factor).chunk(len(self.pulls))
        share = torch.tensor(list(shares), dtype=torch.float64)
        gap, lack = self.drift_mean, 1 - share
        total = self.energy + 2 * lack * float(gap @ self.target_sum) + self.count * lack.square() * float(gap @ gap)
        for i, step in enumerate(steps):
            seen = step @ (self._single_fold_gram if step.dtype == torch.float32 else self.fold_gram)
            along, tilt = float((step * self.residual).sum()), float(gap @ (step.double() @ self.sum))
            total -= 2 * share**i * (along + lack * tilt)
            for j, other in enumerate(steps[: i + 1]):
                total += (1 if i == j else 2) * share ** (i + j) * float((seen * other).sum(dtype=torch.float64))
        return total

    def factor(self, strength: float) -> Tensor | None:
        """Return L of G + λI = L Lᵀ, (k, k) float32; None if that has too few digits, or float64 is asked for."""
        if not self.single:
            return None
        matrix = self.gram.to(torch.float32, copy=True)
        matrix.diagonal().add_(strength)
        return single_cholesky(matrix, SMALLEST_PIVOT)

    def _solve(self, strength: float, factor: Tensor | None) -> Tensor:
        """Return the pulls times (G + λI)⁻¹, one below the other."""
        pulls = torch.cat(self.pulls)
        if factor is not None:
            solution: Tensor = torch.cholesky_solve(pulls.T.float(), factor).T
            return solution
        matrix = self.gram.clone()
        matrix.diagonal().add_(strength)
        return solve(matrix, pulls)

    @cached_property
    def _single_fold_gram(self) -> Tensor:
        return self.fold_gram.float()


@cache
def mixture_of(outputs: int) -> Tensor | None:
    """Return `OUTPUTS` random mixtures of outputs, orthogonal rows of length √(d_out / m); None if there are few."""
    if outputs <= 2 * OUTPUTS:
        return None
    generator = torch.Generator().manual_seed(0)
    rows: Tensor = torch.linalg.qr(torch.randn(outputs, OUTPUTS, dtype=torch.float64, generator=generator)).Q.T
    return rows.mul_((outputs / OUTPUTS) ** 0.5)


def unseen_errors(
    method: Method, weight_kept: Tensor, folds: Sequence[Blend], total: Blend, share: float, *, wide: bool
) -> list[float]:
    """Return errors on held-out folds of a ridge to all others at the rule's strength, one or two of them.

    They are shares of what W_K as it is loses there. The first fold is asked if the fit loses on the last. Nothing is
    returned of a fold that has no token, or all of them, or where nothing is lost.

    Args:
        weight_kept: W_K, (d_out, k) float64.
        folds: if `wide`, of what W_K x lacks, and scored on mixtures of the outputs if there are many; else of y.
        total: their sum.
        share: of the drift, that the weights are fitted to.
    """
    towards_kept = method.ridge_towards == "kept"
    base = None if wide == towards_kept else weight_kept * (-1 if wide else 1)
    errors: list[float] = []
    for fold in dict.fromkeys((len(folds) - 1, 0)):
        blend = folds[fold]
        train, held_out = total - blend, blend.at(1.0)
        if not held_out.count or not train.fit.count or (errors and errors[0] < 1):
            continue
        kept_loses = squared_error(Solution(weight_kept * (not wide)), held_out)
        ridge = RidgeErrors.of(train, held_out, base, centred=method.adds_bias)
        mixture = mixture_of(len(ridge.target_sum)) if wide and towards_kept else None
        ridge = ridge if mixture is None else ridge.mix(mixture.to(ridge.gram.device))
        rule = derive_strength(weight_kept.shape[1], train.fit.count)
        strength = absolute_strength(rule, "relative", train.fit)
        error = float(ridge.at(strength, [share], ridge.factor(strength)))
        errors += [max(error, 0.0) / kept_loses] if kept_loses > 0 else []
    return errors


def loses_to_none(seen: float, unseen: Sequence[float]) -> bool:
    """Return True if a fit is worse than the kept weights as they are, by the .632 estimate of its error.

    Errors are shares of the kept weights' own error on the same tokens. The true error of a fit to all tokens lies
    between two that can be measured: its error on these tokens, and the error on one half of a fit to the other half.
    The estimate weighs both (Efron 1983, J. Am. Stat. Assoc. 78). By the second alone a few windows would rule out fits
    that win.

    Args:
        seen: of the fit to all tokens, on these.
        unseen: of fits to other tokens, each on a part held out; if there is none, False.
    """
    return bool(unseen) and 0.368 * seen + 0.632 * sum(unseen) / len(unseen) > 1


@dataclass
class StrengthWalk:
    """Walks downhill on a grid to the strength of least held-out error of one ridge.

    The first fold is walked down from the strength nearest to the rule's (`methods.derive_strength`). The others are
    scored there and at the better of its two neighbours alone. If the sum over folds is least at that one, the folds
    are gone through again around it. All this is in float32 on mixtures of the outputs, if there are many. Mixtures
    misjudge what the ridge gains on its base. By how much is measured on the first fold, where all outputs are solved
    for at the best strength and share. The errors of all folds are corrected for it.

    Args:
        method: a ridge.
        base: where the change of the weights shrinks to, (d_out, k) float64; None for zero.
        grid: strengths, ascending.
        shares: of the drift, ascending.
        units: of the grid.
    """

    method: Method
    base: Tensor | None
    grid: Sequence[float]
    shares: Sequence[float]
    units: Units
    best: int | None = None
    scored: dict[int, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    _energies: dict[int, float] = field(default_factory=dict)
    _true_gain: float = 1.0

    def see(self, number: int, train: Blend, fold: Fit) -> None:
        """Score the fold of that number, the first of which is 0, by fits to its training tokens."""
        all_outputs = errors = RidgeErrors.of(train, fold, self.base, centred=self.method.adds_bias)
        mixture = mixture_of(len(all_outputs.target_sum))
        if mixture is not None:
            errors = all_outputs.mix(mixture.to(all_outputs.gram.device))
        self._energies[number] = all_outputs.energy
        strengths = [absolute_strength(value, self.units, train.fit) for value in self.grid]
        if self.best is None:
            start = absolute_strength(derive_strength(len(train.fit.sum), train.fit.count), "relative", train.fit)
            logarithms = [math.log(strength or sys.float_info.min) for strength in strengths]
            nearest = min(range(len(strengths)), key=lambda index: abs(logarithms[index] - math.log(start or 1.0)))
            best_factor = self._walk_down(nearest, errors, strengths)
            if mixture is not None:
                self._measure_gain(all_outputs, strengths, best_factor)
        else:
            for index in self._around(self.best) if number == 0 else self._two_best():
                if number not in self.scored[index]:
                    self._score(index, number, errors, strengths)

    def _score(self, index: int, number: int, errors: RidgeErrors, strengths: Sequence[float]) -> Tensor | None:
        """Score a strength on a fold, and return its factor."""
        factor = errors.factor(strengths[index])
        self.scored[index][number] = errors.at(strengths[index], self.shares, factor)
        return factor

    def _walk_down(self, start: int, errors: RidgeErrors, strengths: Sequence[float]) -> Tensor | None:
        """Go to the strength of least error on the first fold, and return its factor."""
        self.best, best_factor = start, self._score(start, 0, errors, strengths)
        centre = None
        while centre != self.best:
            centre = self.best
            for near in self._around(centre):
                if 0 in self.scored[near]:
                    continue
                factor = self._score(near, 0, errors, strengths)
                if self._order_on_first(near) < self._order_on_first(self.best):
                    self.best, best_factor = near, factor
                # Only the best one's is kept: at a width of 11008 a factor takes 300 MB.
                del factor
        return best_factor

    def _measure_gain(self, all_outputs: RidgeErrors, strengths: Sequence[float], best_factor: Tensor | None) -> None:
        """Measure on the first fold, at the best strength and share, by how much mixtures misjudge a ridge's gain."""
        assert self.best is not None
        least, at = self.scored[self.best][0].min(0)
        share = self.shares[int(at)]
        alone = replace(all_outputs.towards(share), single=True)
        true = float(alone.at(strengths[self.best], [share], best_factor))
        gain = all_outputs.energy - float(least)
        self._true_gain = (all_outputs.energy - true) / gain if gain > 0 else 1.0

    def move(self, folds: int) -> bool:
        """Go to the strength of least sum over so many folds, and say whether these must be gone through again."""
        complete = {index: sum(of_fold.values()) for index, of_fold in self.scored.items() if len(of_fold) == folds}
        before = self.best
        self.best = min(complete, key=lambda index: (float(torch.as_tensor(complete[index]).min()), -index))
        return self.best != before

    def least_of(self, number: int) -> tuple[float, float]:
        """Return the least error on a fold that was seen, at the best strength, and the share of the drift it is at."""
        assert self.best is not None
        return min(zip(self._errors(number).tolist(), self.shares, strict=True))

    def _errors(self, number: int) -> Tensor:
        assert self.best is not None
        energy = self._energies[number]
        return (energy - self._true_gain * (energy - self.scored[self.best][number])).clamp_min(0)

    def _around(self, index: int) -> range:
        return range(max(index - 1, 0), min(index + 2, len(self.grid)))

    def _order_on_first(self, index: int) -> tuple[float, int]:
        return float(self.scored[index][0].min()), -index

    def _two_best(self) -> list[int]:
        """Return the best strength, and the neighbour that does better on the first fold, if there is any."""
        assert self.best is not None
        others = [index for index in self._around(self.best) if index != self.best]
        return [self.best, *([min(others, key=self._order_on_first)] if others else [])]

    def errors(self) -> dict[tuple[str, float | None, float], float]:
        """Return the sum over folds at the best strength: method, strength and share → error."""
        assert self.best is not None
        total = torch.stack([self._errors(number) for number in self.scored[self.best]]).sum(0).tolist()
        return {(self.method.name, self.grid[self.best], share): e for share, e in zip(self.shares, total, strict=True)}
