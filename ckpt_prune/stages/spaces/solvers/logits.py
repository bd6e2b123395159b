"""Sites that end in the attention logits: dimensions inside heads that q and k share."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.phases import phase
from ckpt_prune.compensation import logit
from ckpt_prune.compensation.head_shift import HeadEquations, measure_head_shift
from ckpt_prune.compensation.logit import LogitFit, fit_unmeasured
from ckpt_prune.compensation.logit_methods import LOGIT_METHODS, LogitMethod
from ckpt_prune.compensation.low_rank import pair_errors
from ckpt_prune.compensation.mixing import absorb
from ckpt_prune.job.decisions import Decision
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.records import SiteShift
from ckpt_prune.job.selection import in_heads, select_in_heads
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.logits import LogitMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.scoring.logit_scores import LOGIT_SCORES
from ckpt_prune.stages.spaces.solvers.base import SolvedSite, Solver
from ckpt_prune.stages.spaces.solvers.head_errors import (
    enter_diagnostics,
    enter_errors,
    enter_held_out,
    over_heads,
    settle_strength,
)

_TRIAL_STRENGTH = 0.001


class LogitSolver(Solver):
    """Solves sites whose units are dimensions of queries and keys, as many in every head."""

    collects = "logits"

    @property
    def method(self) -> LogitMethod:
        """How queries and keys make up for what they lose."""
        return LOGIT_METHODS[self.own.compensation.method]

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Samples whose Grams span the unknowns of a head."""
        rows, columns = self.method.unknowns(self.model.units(self.space), kept)
        settled = min(tokens, rows) * min(tokens, columns)
        return -(-rows * columns // settled), f"{rows} x {columns} unknowns of a head"

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """CORP's energy and compensation."""
        return {"score": "logit-energy", "compensation": {"method": "logit", "lambda": _TRIAL_STRENGTH}}

    def scores(
        self, block: int, tensors: Mapping[str, Tensor], folds: SpaceMoments, score: str | None = None
    ) -> Tensor:
        """Scores of the dimensions of every head, (heads, dimensions) float64."""
        query, key = (tensors[self.model.tensor(block, module)].to(self.device) for module in self.description.readers)
        known = tuple(each.to(self.device) for each in _logits(folds))
        heads = query.shape[0] // self.model.units(self.space)
        return LOGIT_SCORES[score or self.own.score].function(query, key, sum_folds(known) if known else None, heads)

    def errors(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        scores: Tensor,
        fisher: Fisher | None = None,
    ) -> Tensor:
        """The squared errors of the logits, where the method tells those of every width.

        Elsewhere those that dropped dimensions carry, as if nothing made up for them.
        """
        moments = sum_folds(tuple(each.to(self.device) for each in _logits(folds)))
        if self.method.width_errors is not None:
            lost = self.method.width_errors(self._fitted(moments)) / moments.samples
        else:
            lost = self._carried(moments, scores)
        return over_heads(lost, fisher)

    def tried_errors(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        counts: Sequence[int],
        errors: Tensor,
        fisher: Fisher,
    ) -> list[float]:
        """Those of CORP's solution where the recipe's loses less: the two are tried out by the same logit errors."""
        if self.method.width_errors is None or not counts:
            return super().tried_errors(block, tensors, folds, counts, errors, fisher)
        moments = sum_folds(tuple(each.to(self.device) for each in _logits(folds)))
        trial = self.trial(biased=False)
        corp, scores = (
            LOGIT_METHODS[trial["compensation"]["method"]],
            self.scores(block, tensors, folds, trial["score"]),
        )
        heads, width = scores.shape
        found = []
        for count in counts:
            kept = in_heads(self.select(scores, width - count), heads, width).to(self.device)
            system = logit.logit_system(moments, kept)
            lost = corp.fit(moments, system, kept, _TRIAL_STRENGTH, "relative").errors
            found.append(float(over_heads(lost[:, None] / moments.samples, fisher)))
        return found

    def _fitted(self, moments: LogitMoments) -> LogitMoments:
        """The moments that logits are fitted with."""
        return moments.with_keys(centred=bool(self.own.compensation.centre_keys))

    def _carried(self, moments: LogitMoments, scores: Tensor) -> Tensor:
        """Energies of the k dimensions of least score of each head, for k = 0 … d, (heads, d + 1)."""
        energies = self._fitted(moments).logit_energy().double()
        order = scores.to(energies.device).argsort(dim=-1, stable=True)
        lost = energies.gather(-1, order).cumsum(-1)
        return torch.cat([lost.new_zeros(len(lost), 1), lost], 1)

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """As many dimensions of highest score in every head."""
        return select_in_heads(scores, keep)

    def solve(
        self, block: int, tensors: Mapping[str, Tensor], moments: SpaceMoments | None, decision: Decision
    ) -> SolvedSite:
        """Select dimensions of every head and solve what makes up for the others in q and k.

        See compensation/README.md, section 7.
        """
        modules = self.description.readers
        names = [self.model.tensor(block, module) for module in modules]
        biases = [self.model.tensor(block, module, "bias") for module in modules]
        query, key = (tensors[name].to(self.device) for name in names)
        head_dim = self.model.units(self.space)
        heads = query.shape[0] // head_dim
        folds = tuple(each.to(self.device) for each in _logits(moments))
        whole = sum_folds(folds) if folds else None
        scores = decision.scores
        if scores is None:
            with phase("ranking"):
                scores = LOGIT_SCORES[self.own.score].function(query, key, whole, heads)
        kept = self.select(scores, decision.keep) if decision.kept is None else decision.kept
        plan = self._plan(block, None, kept, scores.flatten())
        if kept.numel() == scores.numel():
            return plan, None
        dimensions = in_heads(kept, heads, head_dim).to(self.device)
        plan.method = self.method.name
        fit = fit_unmeasured(dimensions, head_dim)
        if whole is not None:
            fit = self._fit(plan, dimensions, [self._fitted(each) for each in folds], decision.plan)
        values = [tensors[name].to(self.device) if name in tensors else None for name in biases]
        new = absorb(query, key, values[0], values[1], fit.left, fit.right)
        found = zip([*names, *biases], new, strict=True)
        return plan, {name: tensor.cpu() for name, tensor in found if tensor is not None}

    def shifted(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        others: SpaceMoments,
        solved: SolvedSite,
    ) -> SiteShift | None:
        """Exactly, from the moments: the fit is made once more, and its logits held against those of the others."""
        plan, own, method = solved[0], self.own.compensation, self.method
        whole, test = (
            self._fitted(sum_folds(tuple(m.to(self.device) for m in _logits(each)))) for each in (folds, others)
        )
        kept = in_heads(torch.tensor(plan.kept), whole.heads, whole.head_dim).to(self.device)
        system, theirs = (logit.logit_system(each, kept) for each in (whole, test))
        fit = method.fit(whole, system, kept, plan.strength or 0.0, own.lambda_units)
        lost = pair_errors(test, fit.left, fit.right)
        found = measure_head_shift(
            HeadEquations.of_logits(whole, system),
            HeadEquations.of_logits(test, theirs),
            method.diagnose(test, theirs, fit).floor,
            logit.absolute_logit_strength(plan.strength or 0.0, own.lambda_units, system.diagonal_mean)
            if method.bounded
            else None,
        )
        freedom = whole.heads * method.freedom(whole.head_dim, kept.shape[1])
        return self._shift(found, float(lost.sum()) / test.samples, freedom, whole.tokens)

    def _fit(
        self, plan: SitePlan, dimensions: Tensor, folds: Sequence[LogitMoments], settled: SitePlan | None
    ) -> LogitFit:
        """Fit, and enter errors and diagnostics into the plan."""
        own, method, whole = self.own.compensation, self.method, sum_folds(folds)
        system = logit.logit_system(whole, dimensions)

        def choose(grid: Sequence[float]) -> logit.StrengthChoice:
            return method.choose(folds, dimensions, grid, own.lambda_units)

        held_out = settle_strength(plan, own, settled, len(folds), choose) if method.uses_strength else None
        fit = method.fit(whole, system, dimensions, plan.strength or 0.0, own.lambda_units)
        plan.residual = fit.residual
        enter_errors(plan, system, fit.errors)
        if self.diagnostics and plan.error_uncompensated is not None:
            enter_diagnostics(plan, system, fit.errors, method.diagnose(whole, system, fit), whole.samples)
            enter_held_out(plan, held_out, len(folds), choose)
        return fit


def _logits(folds: SpaceMoments | None) -> tuple[LogitMoments, ...]:
    return tuple(each for each in folds or () if isinstance(each, LogitMoments))
