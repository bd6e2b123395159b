"""Sites that end in the columns of a consumer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, overload

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.compensation.choice import choose_form
from ckpt_prune.compensation.diagnostics import diagnose
from ckpt_prune.compensation.fit import Blend, Fit, Solution, blend_from_moments, squared_error
from ckpt_prune.compensation.logit import absolute_logit_strength as logit_strength
from ckpt_prune.compensation.methods import METHODS, absolute_strength
from ckpt_prune.compensation.shift import degrees_of_freedom, measure_shift
from ckpt_prune.compensation.spectrum import EXACT_WIDTH, spectrum
from ckpt_prune.job.decisions import Decision
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.records import SiteShift
from ckpt_prune.job.selection import select, select_in_heads, unit_scores
from ckpt_prune.job.space_recipe import Compensation
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.scoring.costs import DropOrder
from ckpt_prune.scoring.scores import SCORES
from ckpt_prune.scoring.unit_scores import UNIT_SCORES, centre_gram
from ckpt_prune.stages.spaces.solvers.base import NO_FOLDS, SolvedSite, Solver

_TRIAL_STRENGTH = 0.01


class ColumnSolver(Solver):
    """Solves sites whose units are columns of a consumer."""

    collects = "gram"

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Samples that give a Gram of full rank."""
        inputs = kept * self.model.copies(self.space) * self.model.unit_columns(self.space)
        return -(-inputs // tokens), f"{inputs} inputs of a projection"

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """Optimal brain surgeon; ridge, or affine where the consumer has a bias."""
        method = "affine" if biased else "ridge"
        return {"score": "obs", "compensation": {"method": method, "lambda": _TRIAL_STRENGTH}}

    def column_scores(self, weight: Tensor, moments: Moments | None, name: str | None = None) -> Tensor:
        """Score of every consumer column, (d_in,) float64: the recipe's, or the one named."""
        name = name or self.own.score
        score = SCORES[name]
        if score.needs_moments and moments is None:
            raise ValueError(f"score {name} needs moments")
        return score.function(weight, moments)

    def scores(
        self, block: int, tensors: Mapping[str, Tensor], folds: SpaceMoments, score: str | None = None
    ) -> Tensor:
        """Scores of the units, (units,) float64."""
        weight = tensors[self.model.tensor(block, self.description.consumer)].to(self.device)
        found = tuple(each.to(self.device) for each in select_input_moments(folds))
        return self._unit_scores(weight, sum_folds(found) if found else None, self._methods(block, tensors), score)

    def errors(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        scores: Tensor,
        fisher: Fisher | None = None,
    ) -> Tensor:
        """By one factorisation for all widths (scoring/README.md, section 5)."""
        moments = sum_folds(tuple(each.to(self.device) for each in select_input_moments(folds)))
        metric = None if fisher is None else fisher.mean.to(self.device)
        dropped = self.drop_order(block, tensors, moments, scores.to(self.device))
        costs = dropped.costs(metric)[:: self.model.copies(self.space)] / moments.count
        return (costs if metric is None else costs / 2).cpu()

    def drop_order(self, block: int, tensors: Mapping[str, Tensor], moments: Moments, scores: Tensor) -> DropOrder:
        """The consumer, its units in the order of their scores, the lowest first; in each of several copies as many.

        Args:
            block: index of the block.
            tensors: at least those that `tensors` names and the block has.
            moments: of the consumer's input, of all folds, with a Gram.
            scores: as `scores` gives them.

        Raises:
            UserError: there is no Gram.
        """
        weight = tensors[self.model.tensor(block, self.description.consumer)].to(self.device)
        if moments.gram is None:
            raise UserError("errors of every width need Grams: calibrate with --collect moments,gram")
        gram = centre_gram(moments.gram, moments) if self.centred(block, tensors) else moments.gram
        copies = self.model.copies(self.space)
        order = scores.view(copies, -1).argsort(dim=-1, stable=True)
        order += torch.arange(copies, device=order.device)[:, None] * order.shape[1]
        return DropOrder.of(weight, gram, order.T.flatten(), self.model.unit_columns(self.space))

    def divergence(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        solved: SolvedSite,
        fisher: Fisher,
    ) -> float | None:
        """½ tr(F E[δδᵀ]) of δ = (W − Ŵ) x − b, b being what is added to the bias."""
        moments = sum_folds(select_input_moments(folds)) if folds else None
        if solved[1] is None:
            return 0.0
        if moments is None or moments.gram is None:
            return None
        return self._second(block, tensors, moments, solved, fisher.mean) / 2

    def _second(
        self, block: int, tensors: Mapping[str, Tensor], moments: Moments, solved: SolvedSite, metric: Tensor
    ) -> float:
        """tr(F E[δδᵀ]) under a metric F of outputs, never negative."""
        plan, new = solved
        assert new is not None
        assert moments.gram is not None
        name = self.model.tensor(block, self.description.consumer)
        bias = self.model.tensor(block, self.description.consumer, "bias")
        lost = tensors[name].to(torch.float64, copy=True)
        lost[:, self.columns_of(torch.tensor(plan.kept))] -= new[name]
        second = (metric @ lost * (lost @ moments.gram.double())).sum() / moments.count
        if bias in new:
            added = new[bias] - tensors[bias].double() if bias in tensors else new[bias]
            second += added @ metric @ (added - 2 * lost @ moments.mean)
        return max(0.0, float(second))

    def shifted(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        others: SpaceMoments,
        solved: SolvedSite,
    ) -> SiteShift | None:
        """Exactly, from Grams. Of inputs wider than `EXACT_WIDTH` no eigenvalues are looked for."""
        plan, own = solved[0], self.own.compensation
        weight = tensors[self.model.tensor(block, self.description.consumer)]
        calibration, test = sum_folds(select_input_moments(folds)), sum_folds(select_input_moments(others))
        lost = self._second(block, tensors, test, solved, torch.eye(len(weight), dtype=torch.float64))
        calibration, test = calibration.to(self.device), test.to(self.device)
        columns = self.columns_of(torch.tensor(plan.kept)).to(self.device)
        scale = calibration.square[columns].mean()
        strength = float(logit_strength(plan.strength or 0.0, own.lambda_units, scale))
        spectra = calibration.width <= EXACT_WIDTH
        found = measure_shift(weight.to(self.device), calibration, test, columns, strength, spectra=spectra)
        free = degrees_of_freedom(METHODS[plan.method], len(weight), calibration, columns, strength)
        return self._shift(found, lost, free, calibration.count)

    def columns_of(self, units: Tensor) -> Tensor:
        """The consumer's columns that some units of the site lie on, as the weight has them that is solved."""
        return self.model.consumer_columns(self.space, units)

    def centred(self, block: int, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the kept columns may get a bias, which makes up for every mean."""
        return any(METHODS[method].adds_bias for method in self._methods(block, tensors))

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """The units of highest score, as many in every copy of a space that stands side by side."""
        copies = self.model.copies(self.space)
        return select(scores, keep) if copies == 1 else select_in_heads(scores.view(copies, -1), keep)

    def solve(
        self, block: int, tensors: Mapping[str, Tensor], moments: SpaceMoments | None, decision: Decision
    ) -> SolvedSite:
        """Select columns and solve what stays of the consumer (compensation/README.md, section 2)."""
        own = self.own.compensation
        consumer = self.description.consumer
        name = self.model.tensor(block, consumer)
        bias = tensors.get(self.model.tensor(block, consumer, "bias"))
        methods = self._methods(block, tensors)
        weight = tensors[name].to(self.device)
        folds = tuple(each.to(self.device) for each in select_input_moments(moments))
        whole = sum_folds(folds) if folds else None
        scores = decision.scores
        if scores is None:
            scores = self._unit_scores(weight, whole, methods, decision.score)
        kept = self.select(scores, decision.keep) if decision.kept is None else decision.kept
        plan = self._plan(block, name, kept, scores)
        plan.score = decision.score
        plan.few = None if whole is None else whole.few
        if kept.numel() == scores.numel():
            return plan, None
        columns = self.columns_of(kept).to(self.device)
        weight_kept = weight[:, columns].double()
        plan.method = methods[0]
        if whole is None:
            return plan, {name: weight_kept.cpu()}
        lacking = [m for m in methods if METHODS[m].needs_gram]
        if lacking and whole.gram is None:
            raise UserError(
                f"compensation {lacking[0]} needs Grams, and these statistics have none: "
                "calibrate with --collect moments,gram"
            )
        known = decision.plan
        by_folds = own.by_folds and known is None
        if by_folds and len(folds) < 2:
            raise UserError(NO_FOLDS)
        # The sum of folds only where something is chosen on them: diagnostics must not change a bit of the result.
        summed = own.by_folds and len(folds) > 1
        blends = _Blends(weight, folds, columns)
        blend = reduce(add, blends) if summed else blend_from_moments(weight, whole, columns)
        if by_folds:
            self._choose(plan, own, methods, weight_kept, blends, blend)
        elif known is not None:
            plan.method, plan.strength, plan.share = known.method, known.strength, known.share
            plan.error_held_out, plan.runner_up, plan.margin = known.error_held_out, known.runner_up, known.margin
        else:
            plan.strength = own.strength if METHODS[methods[0]].uses_strength else None
            plan.share = own.drift_shares[0]
        if whole.drift is None:
            plan.share = None
        fit, target = blend.at(plan.share or 0.0), blend.at(1.0)
        fold = METHODS[plan.method].fit(weight_kept, fit, self._absolute(plan, own, fit))
        if target.target_energy:
            plan.error_uncompensated = squared_error(Solution(weight_kept), target) / target.target_energy
            plan.error_compensated = squared_error(fold, target) / target.target_energy
        if self.diagnostics and whole.gram is not None:
            self._describe(plan, weight, whole, columns)
            if len(folds) > 1 and plan.method == "none":
                plan.error_held_out = plan.error_uncompensated
            elif len(folds) > 1 and target.target_energy and plan.error_held_out is None:
                plan.error_held_out = self._held_out(plan, own, weight_kept, blends, blend) / target.target_energy
        new = {name: fold.weight.cpu()}
        if fold.bias is not None:
            bias_name = self.model.tensor(block, consumer, "bias")
            new[bias_name] = fold.bias.cpu() if bias is None else fold.bias.cpu() + bias.double()
        return plan, new

    def _choose(
        self,
        plan: SitePlan,
        own: Compensation,
        methods: list[str],
        weight_kept: Tensor,
        folds: Sequence[Blend],
        total: Blend,
    ) -> None:
        """Enter into the plan what is best on held-out folds."""
        shares = own.drift_shares
        chosen = choose_form(weight_kept, folds, methods, own.grid, shares, own.lambda_units, total=total)
        plan.method, plan.strength, plan.share = chosen.best.method, chosen.best.strength, chosen.best.share
        plan.error_held_out = chosen.best.error
        plan.runner_up, plan.margin = chosen.runner_up, chosen.margin if chosen.runner_up else None

    @staticmethod
    def _describe(plan: SitePlan, weight: Tensor, moments: Moments, kept: Tensor) -> None:
        """Enter CORP's errors and the spectrum of the inputs into the plan."""
        ColumnSolver.enter_errors(plan, weight, moments, kept)
        plan.width = moments.width
        spread = spectrum(moments)
        plan.effective_rank, plan.k95, plan.active = spread.effective_rank, spread.k95, spread.active

    @staticmethod
    def enter_errors(plan: SitePlan, weight: Tensor, moments: Moments, kept: Tensor) -> None:
        """Enter CORP's errors into the plan."""
        if moments.drift is None:  # the errors are of W x alone
            found = diagnose(weight, moments, kept)
            plan.j0, plan.floor, plan.rho2 = found.uncompensated, found.floor, found.rho2

    def _held_out(
        self, plan: SitePlan, own: Compensation, weight_kept: Tensor, folds: Sequence[Blend], total: Blend
    ) -> float:
        """Σ ‖y − ŷ‖² over every fold of what the plan's compensation gives when fitted to the others."""
        found = 0.0
        for each in folds:
            train = (total - each).at(plan.share or 0.0)
            trained = METHODS[plan.method].fit(weight_kept, train, self._absolute(plan, own, train))
            found += squared_error(trained, each.at(1.0))
        return found

    @staticmethod
    def _absolute(plan: SitePlan, own: Compensation, fit: Fit) -> float:
        """The plan's λ on the scale of a fit's Gram; 0 where there is none."""
        return 0.0 if plan.strength is None else absolute_strength(plan.strength, own.lambda_units, fit)

    def _methods(self, block: int, tensors: Mapping[str, Tensor]) -> list[str]:
        """Closed forms to choose from."""
        biased = self.model.tensor(block, self.description.consumer, "bias") in tensors
        return self.own.compensation.methods(biased=biased)

    @phase("ranking")
    def _unit_scores(
        self, weight: Tensor, moments: Moments | None, methods: list[str], score: str | None = None
    ) -> Tensor:
        """Score of every unit, (units,) float64, where one of `methods` makes up for what goes."""
        name, per_unit = score or self.own.score, self.model.unit_columns(self.space)
        if name not in UNIT_SCORES:
            return unit_scores(self.column_scores(weight, moments, name), per_unit)
        if moments is None:
            raise ValueError(f"score {name} needs moments")
        centred = any(METHODS[method].adds_bias for method in methods)
        return UNIT_SCORES[name].function(weight, moments, per_unit, centred=centred)


@dataclass(frozen=True)
class _Blends(Sequence[Blend]):
    """Blends of the folds of a site, made when asked for: of a width of 11008 each takes a gigabyte."""

    weight: Tensor
    folds: tuple[Moments, ...]
    kept: Tensor

    def __len__(self) -> int:
        return len(self.folds)

    @overload
    def __getitem__(self, index: int) -> Blend: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Blend]: ...
    def __getitem__(self, index: int | slice) -> Blend | Sequence[Blend]:
        if isinstance(index, slice):
            return _Blends(self.weight, self.folds[index], self.kept)
        return blend_from_moments(self.weight, self.folds[index], self.kept)
