"""Sites that end in the attention logits: dimensions inside heads that q and k share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.phases import phase
from ckpt_prune.compensation import logit
from ckpt_prune.compensation.logit_methods import LOGIT_METHODS, LogitMethod
from ckpt_prune.compensation.mixing import absorb
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.logits import LogitMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.scoring.logit_scores import LOGIT_SCORES
from ckpt_prune.scoring.selection import in_heads, select_in_heads
from ckpt_prune.stages.spaces.solvers.heads import HeadSolver

_TRIAL_STRENGTH = 0.001


class LogitSolver(HeadSolver[LogitMoments]):
    """Solves sites whose units are dimensions of queries and keys, as many in every head."""

    collects = "logits"
    moments_type = LogitMoments

    @property
    def method(self) -> LogitMethod:
        return LOGIT_METHODS[self.settings.compensation.method]

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        rows, columns = self.method.unknowns(max(self.model.unit_counts(self.space)), kept)
        settled = min(tokens, rows) * min(tokens, columns)
        return -(-rows * columns // settled), f"{rows} x {columns} unknowns of a head"

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        return {"score": "logit-energy", "compensation": {"method": "logit", "lambda": _TRIAL_STRENGTH}}

    @phase("ranking")
    def scores(self, block: int, tensors: Tensors, folds: SpaceMoments, score: str | None = None) -> Tensor:
        """Return the scores of the dimensions of every head, (heads, dimensions) float64."""
        query, key = (tensors[self.model.tensor(block, module)].to(self.device) for module in self.description.readers)
        moments = self._moments(folds)
        heads = query.shape[0] // self.model.units(self.space, block)
        function = LOGIT_SCORES[score or self.settings.score].function
        return function(query, key, sum_folds(moments) if moments else None, heads)

    def errors(
        self, block: int, tensors: Tensors, folds: SpaceMoments, scores: Tensor, fisher: Fisher | None = None
    ) -> Tensor:
        """Return the squared errors of the logits if the method knows those of every width.

        Else what the dropped dimensions carry, as if nothing made up for them.
        """
        moments = self._choose_keys(sum_folds(self._moments(folds)))
        if self.method.width_errors is not None:
            return self._over_heads(self.method.width_errors(moments) / moments.samples, fisher)
        energies = moments.logit_energy().double()
        order = scores.to(energies.device).argsort(dim=-1, stable=True)
        lost = energies.gather(-1, order).cumsum(-1)
        return self._over_heads(torch.cat([lost.new_zeros(len(lost), 1), lost], 1), fisher)

    def tried_errors(
        self, block: int, tensors: Tensors, folds: SpaceMoments, counts: Sequence[int], errors: Tensor, fisher: Fisher
    ) -> list[float]:
        """Return those of CORP's solution if the recipe's loses less: both are tried by the same logit errors."""
        if self.method.width_errors is None or not counts:
            return super().tried_errors(block, tensors, folds, counts, errors, fisher)
        moments = sum_folds(self._moments(folds))
        trial = self.trial(biased=False)
        corp = LOGIT_METHODS[trial["compensation"]["method"]]
        scores = self.scores(block, tensors, folds, trial["score"])
        heads, width = scores.shape
        divergences = []
        for count in counts:
            kept = in_heads(self.select(scores, width - count), heads, width).to(self.device)
            system = logit.logit_system(moments, kept)
            lost = corp.fit(moments, system, kept, _TRIAL_STRENGTH, "relative").errors
            divergences.append(float(self._over_heads(lost[:, None] / moments.samples, fisher)))
        return divergences

    def _choose_keys(self, moments: LogitMoments) -> LogitMoments:
        return moments.with_keys(centred=bool(self.settings.compensation.centre_keys))

    def select(self, scores: Tensor, keep: int) -> Tensor:
        return select_in_heads(scores, keep)

    def _compensate(
        self, plan: SitePlan, tensors: Tensors, kept: Tensor, folds: tuple[LogitMoments, ...], planned: SitePlan | None
    ) -> dict[str, Tensor]:
        modules = self.description.readers
        names = [self.model.tensor(plan.block, module) for module in modules]
        biases = [self.model.tensor(plan.block, module, "bias") for module in modules]
        query, key = (tensors[name].to(self.device) for name in names)
        values = [tensors[name].to(self.device) if name in tensors else None for name in biases]
        fit = logit.fit_unmeasured(kept, self.model.units(self.space, plan.block))
        if folds:
            fit = self._fit(plan, kept, [self._choose_keys(each) for each in folds], planned)
        new = zip([*names, *biases], absorb(query, key, values[0], values[1], fit.left, fit.right), strict=True)
        return {name: tensor.cpu() for name, tensor in new if tensor is not None}

    def _fit(
        self, plan: SitePlan, kept: Tensor, folds: Sequence[LogitMoments], planned: SitePlan | None
    ) -> logit.LogitFit:
        compensation, method, summed = self.settings.compensation, self.method, sum_folds(folds)
        system = logit.logit_system(summed, kept)

        def choose(grid: Sequence[float]) -> logit.StrengthChoice:
            return method.choose(folds, kept, grid, compensation.lambda_units)

        held_out = self._settle_strength(plan, planned, len(folds), choose) if method.uses_strength else None
        fit = method.fit(summed, system, kept, plan.strength or 0.0, compensation.lambda_units)
        plan.residual = fit.residual
        if self._enter_errors(plan, system, fit.errors):
            diagnostics = method.diagnose(summed, system, fit)
            self._enter_diagnostics(plan, system, fit.errors, diagnostics, summed.samples)
            self._enter_held_out(plan, held_out, len(folds), choose)
        return fit
