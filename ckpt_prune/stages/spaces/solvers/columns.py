"""Sites that end in the columns of a consumer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import starmap
from operator import add
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.compensation.choice import choose_form
from ckpt_prune.compensation.diagnostics import diagnose
from ckpt_prune.compensation.fit import (
    CHUNK,
    Blend,
    Fit,
    Solution,
    blend_from_moments,
    lack_from_moments,
    squared_error,
)
from ckpt_prune.compensation.methods import METHODS, absolute_strength, derive_strength
from ckpt_prune.compensation.spectrum import spectrum
from ckpt_prune.compensation.strength_walk import loses_to_none, unseen_errors
from ckpt_prune.compensation.wide_sites import choose_wide, fit_change, is_wide
from ckpt_prune.job.decisions import SiteDecision
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moments.gram import add_gram
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.scoring.costs import WIDE, DropOrder
from ckpt_prune.scoring.scores import SCORES
from ckpt_prune.scoring.selection import select, select_in_heads, unit_scores
from ckpt_prune.scoring.unit_scores import UNIT_SCORES, centre_gram
from ckpt_prune.stages.spaces.solvers.base import NO_FOLDS, SolvedSite, Solver


class ColumnSolver(Solver):
    """Solves sites whose units are columns of a consumer."""

    collects = "gram"
    has_spectrum: ClassVar[bool] = True

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Return how many samples give a Gram of full rank."""
        inputs = kept * self.model.copies(self.space) * self.model.unit_columns(self.space)
        return -(-inputs // tokens), f"{inputs} inputs of a projection"

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        return {"score": "obs", "compensation": {"method": "affine" if biased else "ridge", "lambda": 0.01}}

    def _consumer(self, block: int, kind: Literal["weight", "bias"] = "weight") -> str:
        return self.model.tensor(block, self.description.consumer, kind)

    def _moments(self, folds: SpaceMoments | None) -> tuple[Moments, ...]:
        return tuple(each.to(self.device) for each in select_input_moments(folds))

    def column_scores(self, weight: Tensor, moments: Moments | None, name: str | None = None) -> Tensor:
        """Return the score of every consumer column, (d_in,) float64, by the recipe's score or the named one."""
        name = name or self.settings.score
        if SCORES[name].needs_moments and moments is None:
            raise ValueError(f"score {name} needs moments")
        return SCORES[name].function(weight, moments)

    def scores(
        self, block: int, tensors: Tensors, folds: SpaceMoments, score: str | None = None, count: int | None = None
    ) -> Tensor:
        """Return the scores of the units, (units,) float64; with `count`, for choosing so many of them at most.

        Only a wide site is ranked in less time for that.
        """
        weight, moments = tensors[self._consumer(block)].to(self.device), self._moments(folds)
        summed, methods = sum_folds(moments) if moments else None, self._methods(block, tensors)
        return self._unit_scores(weight, summed, methods, score, count if self._is_cut_short(weight) else None)

    def errors(
        self, block: int, tensors: Tensors, folds: SpaceMoments, scores: Tensor, fisher: Fisher | None = None
    ) -> Tensor:
        """Return the errors of all widths, by one factorisation (scoring/README.md, section 5)."""
        moments = sum_folds(self._moments(folds))
        metric = None if fisher is None else fisher.mean.to(self.device)
        order = self.drop_order(block, tensors, moments, scores.to(self.device))
        costs = order.costs(metric)[:: self.model.copies(self.space)] / moments.count
        return (costs if metric is None else costs / 2).cpu()

    def drop_order(self, block: int, tensors: Tensors, moments: Moments, scores: Tensor) -> DropOrder:
        """Return the consumer with its units in the order of their scores, the lowest first; as many in each copy.

        Args:
            moments: of the consumer's input, of all folds, with a Gram.
        """
        weight = tensors[self._consumer(block)].to(self.device)
        if moments.gram is None:
            raise UserError("errors of every width need Grams: calibrate with --collect moments,gram")
        gram = centre_gram(moments.gram, moments) if self.is_centred(block, tensors) else moments.gram
        copies = self.model.copies(self.space)
        order = scores.view(copies, -1).argsort(dim=-1, stable=True)
        order += torch.arange(copies, device=order.device)[:, None] * order.shape[1]
        return DropOrder.of(weight, gram, order.T.flatten(), self.model.unit_columns(self.space))

    def divergence(self, tensors: Tensors, folds: SpaceMoments, solved: SolvedSite, fisher: Fisher) -> float | None:
        """Return ½ tr(F E[δδᵀ]) for δ = (W − Ŵ) x − b, with b added to the bias; never negative."""
        plan, new = solved
        if new is None:
            return 0.0
        metric, moments = fisher.mean, sum_folds(select_input_moments(folds)) if folds else None
        if moments is None or moments.gram is None:
            return None
        name, bias = self._consumer(plan.block), self._consumer(plan.block, "bias")
        lost = tensors[name].to(torch.float64, copy=True)
        lost[:, self.columns_of(torch.tensor(plan.kept))] -= new[name]
        second = (metric @ lost * (lost @ moments.gram.double())).sum() / moments.count
        if bias in new:
            added = new[bias] - tensors[bias].double() if bias in tensors else new[bias]
            second += added @ metric @ (added - 2 * lost @ moments.mean)
        return max(0.0, float(second)) / 2

    def _is_cut_short(self, weight: Tensor) -> bool:
        """Return True if a site is not ranked beyond what goes; copies lose as many, whatever their order together."""
        return self.model.copies(self.space) == 1 and weight.shape[1] > WIDE

    def columns_of(self, units: Tensor) -> Tensor:
        """Return the columns of some units of the site, in the consumer's weight as it is solved."""
        return self.model.consumer_columns(self.space, units)

    def is_centred(self, block: int, tensors: Tensors) -> bool:
        """Return True if the kept columns may get a bias, which makes up for every mean."""
        return any(METHODS[method].adds_bias for method in self._methods(block, tensors))

    def select(self, scores: Tensor, keep: int) -> Tensor:
        copies = self.model.copies(self.space)
        return select(scores, keep) if copies == 1 else select_in_heads(scores.view(copies, -1), keep)

    def solve(self, block: int, tensors: Tensors, folds: SpaceMoments | None, decision: SiteDecision) -> SolvedSite:
        """Select columns and solve what stays of the consumer (compensation/README.md, section 2)."""
        name, methods = self._consumer(block), self._methods(block, tensors)
        weight, moments = tensors[name].to(self.device), self._moments(folds)
        summed = sum_folds(moments) if moments else None
        kept, scores = self._choose_units(weight, summed, methods, decision)
        plan = self._plan(block, name, kept, scores)
        plan.score, plan.few = decision.score, None if summed is None else summed.few
        if kept.numel() == scores.numel():
            return plan, None
        plan.method = methods[0]
        columns = self.columns_of(kept).to(self.device)
        if summed is None:
            return plan, {name: weight[:, columns].double().cpu()}
        self._check_moments(methods, moments, summed, chosen=decision.plan is None)
        wide = summed.gram is not None and is_wide(len(columns), summed.count)
        # Before there are float64 copies of Grams, since this makes a matrix of the same size.
        energies = _energies(weight, moments) if wide else []
        site = _Site(weight, moments, summed, columns, self.settings.compensation.by_folds, wide, energies)
        unseen = self._choose_form(plan, site, methods, decision.plan)
        solution = self._fit(plan, site, unseen)
        if self.diagnostics and summed.gram is not None:
            self._enter_diagnostics(plan, weight, summed, columns)
            self._enter_held_out(plan, site)
        return plan, self._new_tensors(block, tensors, site, solution)

    def _choose_units(
        self, weight: Tensor, moments: Moments | None, methods: list[str], decision: SiteDecision
    ) -> tuple[Tensor, Tensor]:
        """Return the units that stay, ascending, and the scores of all."""
        scores = decision.scores
        if scores is None:
            lines = weight.shape[1] // self.model.unit_columns(self.space)
            count = lines - decision.keep if self._is_cut_short(weight) else None
            scores = self._unit_scores(weight, moments, methods, decision.score, count)
        return self.select(scores, decision.keep) if decision.kept is None else decision.kept, scores

    def _check_moments(self, methods: list[str], folds: tuple[Moments, ...], summed: Moments, *, chosen: bool) -> None:
        """Refuse moments without Grams, and too few folds if something is chosen on them."""
        needing = [method for method in methods if METHODS[method].needs_gram]
        if needing and summed.gram is None:
            raise UserError(
                f"compensation {needing[0]} needs Grams, and these statistics have none: "
                "calibrate with --collect moments,gram"
            )
        if self.settings.compensation.by_folds and chosen and len(folds) < 2:
            raise UserError(NO_FOLDS)

    def _choose_form(self, plan: SitePlan, site: "_Site", methods: list[str], planned: SitePlan | None) -> list[float]:
        """Enter method, strength and share into the plan: as planned, chosen on held-out folds, or by rule.

        Return errors on tokens that a fit by rule has not seen, as shares of what no compensation would leave.
        """
        compensation, unseen = self.settings.compensation, list[float]()
        if planned is not None:
            plan.method, plan.strength, plan.share = planned.method, planned.strength, planned.share
            plan.error_held_out, plan.runner_up, plan.margin = planned.error_held_out, planned.runner_up, planned.margin
        elif compensation.by_folds:
            how: Any = (methods, compensation.grid, compensation.drift_shares, compensation.lambda_units)
            if site.wide:
                choice = choose_wide(site.weight_kept, site, *how, total=site.total, energies=site.energies)
            else:
                choice = choose_form(site.weight_kept, site, *how, total=site.total)
            plan.method, plan.strength, plan.share = choice.best.method, choice.best.strength, choice.best.share
            plan.error_held_out = choice.best.error
            plan.runner_up, plan.margin = choice.runner_up, choice.margin if choice.runner_up else None
        else:
            method = METHODS[plan.method]
            plan.strength = compensation.strength if method.uses_strength else None
            plan.share = compensation.drift_shares[0]
            if compensation.by_rule:
                plan.strength = derive_strength(len(site.kept), site.moments.count)
                if len(site) > 1:
                    unseen = unseen_errors(method, site.weight_kept, site, site.total, plan.share, wide=site.wide)
        if site.moments.drift is None:  # then there is one target
            plan.share = None
        return unseen

    def _fit(self, plan: SitePlan, site: "_Site", unseen: list[float]) -> Solution:
        """Fit what stays as the plan says, and enter its error; without compensation where that loses no more."""
        solution = self._solve(plan, site, site.total)
        if site.energy:
            target = site.target
            plain = target.second_moments()[2] if site.wide else squared_error(Solution(site.weight_kept), target)
            error = squared_error(solution, target)
            if plain and loses_to_none(error / plain, unseen):
                plan.method, plan.strength, error = "none", None, plain
                solution = self._solve(plan, site, site.total)
            plan.error_uncompensated, plan.error_compensated = plain / site.energy, error / site.energy
            if unseen:
                plan.error_held_out = sum(unseen) / len(unseen) * plan.error_uncompensated
        return solution

    def _solve(self, plan: SitePlan, site: "_Site", train: Blend) -> Solution:
        """Apply the plan's compensation, with its λ on the scale of the fit's Gram; 0 if there is none.

        At a wide site the fit is to what the kept weights lack, and the solution is what is added to them.
        """
        fit, method = train.at(plan.share or 0.0), METHODS[plan.method]
        units = self.settings.compensation.lambda_units
        strength = 0.0 if plan.strength is None else absolute_strength(plan.strength, units, fit)
        if site.wide:
            return fit_change(method, site.weight_kept, fit, strength)
        return method.fit(site.weight_kept, fit, strength)

    def _new_tensors(self, block: int, tensors: Tensors, site: "_Site", solution: Solution) -> dict[str, Tensor]:
        """Return the consumer's weight and, if a bias is added to it, its whole bias: float64 on CPU."""
        name, bias_name = self._consumer(block), self._consumer(block, "bias")
        new = {name: (site.weight_kept + solution.weight if site.wide else solution.weight).cpu()}
        if solution.bias is not None:
            bias = tensors.get(bias_name)
            new[bias_name] = solution.bias.cpu() if bias is None else solution.bias.cpu() + bias.double()
        return new

    def _enter_held_out(self, plan: SitePlan, site: "_Site") -> None:
        """Enter the error on each fold of the plan's compensation fitted to the other folds, if it is not known."""
        if len(site) < 2 or plan.error_held_out is not None:
            return
        if plan.method == "none":
            plan.error_held_out = plan.error_uncompensated
        elif site.energy:
            solutions = ((self._solve(plan, site, site.total - fold), fold.at(1.0)) for fold in site)
            plan.error_held_out = sum(starmap(squared_error, solutions)) / site.energy

    def _enter_diagnostics(self, plan: SitePlan, weight: Tensor, moments: Moments, kept: Tensor) -> None:
        """Enter CORP's errors and the spectrum of the inputs into the plan."""
        if moments.drift is None:  # the errors are of W x alone
            errors = diagnose(weight, moments, kept)
            plan.j0, plan.floor, plan.rho2 = errors.uncompensated, errors.floor, errors.rho2
        if self.has_spectrum:
            plan.width, spread = moments.width, spectrum(moments)
            plan.effective_rank, plan.k95, plan.k95_inputs = spread.effective_rank, spread.k95, spread.k95_inputs
            plan.active = spread.active

    def _methods(self, block: int, tensors: Tensors) -> list[str]:
        return self.settings.compensation.methods(biased=self._consumer(block, "bias") in tensors)

    @phase("ranking")
    def _unit_scores(
        self,
        weight: Tensor,
        moments: Moments | None,
        methods: list[str],
        score: str | None = None,
        count: int | None = None,
    ) -> Tensor:
        """Return the score of every unit, (units,) float64, if one of `methods` makes up for what goes.

        With `count`, scores are for choosing so many units alone.
        """
        name, per_unit = score or self.settings.score, self.model.unit_columns(self.space)
        if name not in UNIT_SCORES:
            return unit_scores(self.column_scores(weight, moments, name), per_unit)
        if moments is None:
            raise ValueError(f"score {name} needs moments")
        centred = any(METHODS[method].adds_bias for method in methods)
        return UNIT_SCORES[name].function(weight, moments, per_unit, centred=centred, count=count)


@dataclass(frozen=True)
class _Site(Sequence[Blend]):
    """Blends of the folds of a site, made when they are read: at a width of 11008 one is a gigabyte.

    Attributes:
        weight: of the consumer, (d_out, d_in).
        folds, moments: of its inputs, by fold and of all.
        kept: columns that stay.
        by_folds: whether something is chosen on held-out folds.
        wide: whether blends are of what the kept weights lack.
        energies: Σ ‖y‖² of every fold, at α = 1, of a wide site.
    """

    weight: Tensor
    folds: tuple[Moments, ...]
    moments: Moments
    kept: Tensor
    by_folds: bool
    wide: bool
    energies: list[float]

    def __len__(self) -> int:
        return len(self.folds)

    def __getitem__(self, index: Any) -> Any:
        return self._blend(self.folds[index])

    @cached_property
    def weight_kept(self) -> Tensor:
        return self.weight[:, self.kept].double()

    @cached_property
    def total(self) -> Blend:
        # The sum of folds only if something is chosen on them: diagnostics must not change a bit of the result.
        summed = self.by_folds and len(self) > 1 and not self.wide
        return reduce(add, self) if summed else self._blend(self.moments)

    @cached_property
    def target(self) -> Fit:
        """The fit to the dense model's own residual stream."""
        return self.total.at(1.0)

    @property
    def energy(self) -> float:
        """Σ ‖y‖² of all folds, at α = 1; 0 if it is not known."""
        return sum(self.energies) if self.wide else self.target.target_energy or 0.0

    def _blend(self, moments: Moments) -> Blend:
        make = lack_from_moments if self.wide else blend_from_moments
        return make(self.weight, moments, self.kept)


def _energies(weight: Tensor, folds: Sequence[Moments]) -> list[float]:
    """Return Σ ‖y‖² of every fold at α = 1, with y = W x + δ."""
    outer = torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
    add_gram(outer, weight)
    energies = []
    for fold in folds:
        assert fold.gram is not None
        parts = zip(torch.split(outer, CHUNK), torch.split(fold.gram, CHUNK), strict=True)
        energy = sum(float((one * other).sum(dtype=torch.float64)) for one, other in parts)
        if fold.drift is not None:
            energy += 2 * float((fold.drift.cross * weight).sum(dtype=torch.float64)) + fold.drift.energy
        energies.append(energy)
    return energies
