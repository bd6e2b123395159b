"""Sites of rotary pairs: of queries and keys that are turned by position."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.phases import phase
from ckpt_prune.compensation.head_shift import HeadEquations, measure_head_shift
from ckpt_prune.compensation.logit import StrengthChoice, absolute_logit_strength
from ckpt_prune.compensation.rotary import (
    absorb_factors,
    choose_factors,
    diagnose_factors,
    factor_errors,
    factor_freedom,
    pair_rows,
    rotary_system,
    solve_factors,
)
from ckpt_prune.job.decisions import Decision
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.records import SiteShift
from ckpt_prune.job.selection import in_heads, select_in_heads
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.model.family import KINDS
from ckpt_prune.scoring.rotary_scores import ROTARY_SCORES, bare_errors, refitted_errors
from ckpt_prune.stages.spaces.solvers.base import SolvedSite, Solver
from ckpt_prune.stages.spaces.solvers.head_errors import (
    enter_diagnostics,
    enter_errors,
    enter_held_out,
    over_heads,
    settle_strength,
)

_TRIAL_STRENGTH = 0.001


class RotarySolver(Solver):
    """Solves sites whose units are rotary pairs, as many in every KV head."""

    collects = "rotary"

    @property
    def tried_out(self) -> bool:
        """With factors, as they are tried out."""
        return self.own.compensation.method == "factors"

    @property
    def _groups(self) -> int:
        return self.model.dimension("group")

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Samples whose pairs of tokens settle two unknowns a pair."""
        return -(-2 * kept // tokens**2), f"{2 * kept} unknowns of a head"

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """Optimal brain surgeon and factors."""
        return {"score": "obs", "compensation": {"method": "factors", "lambda": _TRIAL_STRENGTH}}

    @phase("ranking")
    def scores(
        self, block: int, tensors: Mapping[str, Tensor], folds: SpaceMoments, score: str | None = None
    ) -> Tensor:
        """Scores of the pairs of every KV head, (KV heads, pairs) float64."""
        query, key = (tensors[self.model.tensor(block, module)].to(self.device) for module in self.description.readers)
        known = tuple(each.to(self.device) for each in _moments(folds))
        every = self._every().to(self.device)
        pairs, layout = every.shape[1], self.description.pairs
        rows = pair_rows(every, pairs, self._groups, layout).view(len(every), -1, pairs, 2)
        of_query = query[rows.transpose(1, 2)]
        of_key = key[pair_rows(every, pairs, 1, layout)]
        return ROTARY_SCORES[score or self.own.score].function(of_query, of_key, sum_folds(known) if known else None)

    def _every(self) -> Tensor:
        """All pairs of every KV head."""
        return torch.arange(self.model.units(self.space)).expand(self.model.copies(self.space), -1)

    def errors(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        scores: Tensor,
        fisher: Fisher | None = None,
    ) -> Tensor:
        """The squared errors of the logits, with every pair that stays refitted where the recipe does so."""
        moments = sum_folds(tuple(each.to(self.device) for each in _moments(folds)))
        curve = bare_errors if self.own.compensation.method == "none" else refitted_errors
        lost = curve(moments, scores.to(self.device)) / moments.samples
        return over_heads(lost, fisher)

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """As many pairs of highest score in every KV head."""
        return select_in_heads(scores.view(self.model.copies(self.space), -1), keep)

    def solve(
        self, block: int, tensors: Mapping[str, Tensor], moments: SpaceMoments | None, decision: Decision
    ) -> SolvedSite:
        """Select pairs of every KV head, and solve factors for them (compensation/README.md, section 9)."""
        folds = tuple(each.to(self.device) for each in _moments(moments))
        scores = self.scores(block, tensors, folds) if decision.scores is None else decision.scores
        kept = self.select(scores, decision.keep) if decision.kept is None else decision.kept
        plan = self._plan(block, None, kept, scores.flatten())
        if kept.numel() == scores.numel():
            return plan, None
        pairs = self.model.units(self.space)
        own = in_heads(kept, self.model.copies(self.space), pairs).to(self.device)
        plan.method = self.own.compensation.method
        factors = self._fit(plan, own, folds, decision.plan) if folds else None
        new: dict[str, Tensor] = {}
        query, key = self.description.readers
        for module, absorbed, copies in ((query, factors, self._groups), (key, None, 1)):
            if module not in self.description.rewritten(plan.method):
                continue
            for kind in KINDS:
                name = self.model.tensor(block, module, kind)
                if name in tensors:
                    rows = tensors[name].to(self.device)
                    new[name] = absorb_factors(rows, absorbed, own, pairs, copies, self.description.pairs).cpu()
        return plan, new

    def shifted(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        others: SpaceMoments,
        solved: SolvedSite,
    ) -> SiteShift | None:
        """Exactly, from the moments: factors are solved once more, and held against the logits of the others."""
        plan, units = solved[0], self.own.compensation.lambda_units
        whole, test = (sum_folds(tuple(m.to(self.device) for m in _moments(each))) for each in (folds, others))
        copies = self.model.copies(self.space)
        kept = in_heads(torch.tensor(plan.kept), copies, self.model.units(self.space)).to(self.device)
        system, theirs = (rotary_system(each, kept) for each in (whole, test))
        strength = absolute_logit_strength(plan.strength or 0.0, units, system.diagonal_mean)
        lost = theirs.dropped_energy
        if plan.method != "none":
            lost = factor_errors(theirs, solve_factors(system, strength))
        found = measure_head_shift(
            HeadEquations.of_pairs(whole, system),
            HeadEquations.of_pairs(test, theirs),
            diagnose_factors(theirs, lost).floor,
            strength,
        )
        freedom = 0 if plan.method == "none" else factor_freedom(system, strength)
        return self._shift(found, float(lost.sum()) / test.samples, freedom, whole.tokens)

    def _fit(
        self, plan: SitePlan, kept: Tensor, folds: Sequence[RotaryMoments], settled: SitePlan | None
    ) -> Tensor | None:
        """Fit, and enter errors and diagnostics into the plan."""
        own, whole = self.own.compensation, sum_folds(folds)
        system = rotary_system(whole, kept)
        factors: Tensor | None = None
        errors, held_out = system.dropped_energy, None

        def choose(grid: Sequence[float]) -> StrengthChoice:
            return choose_factors(folds, kept, grid, own.lambda_units)

        if plan.method != "none":
            held_out = settle_strength(plan, own, settled, len(folds), choose)
            strength = absolute_logit_strength(plan.strength or 0.0, own.lambda_units, system.diagonal_mean)
            factors = solve_factors(system, strength)
            errors = factor_errors(system, factors)
        enter_errors(plan, system, errors)
        if self.diagnostics and plan.error_uncompensated is not None:
            enter_diagnostics(plan, system, errors, diagnose_factors(system, errors), whole.samples)
            enter_held_out(plan, held_out, len(folds), choose)
        return factors


def _moments(folds: SpaceMoments | None) -> tuple[RotaryMoments, ...]:
    return tuple(each for each in folds or () if isinstance(each, RotaryMoments))
