"""Sites of rotary pairs: of queries and keys that are turned by position."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.phases import phase
from ckpt_prune.compensation.logit import StrengthChoice, absolute_logit_strength
from ckpt_prune.compensation.rotary import (
    absorb_factors,
    choose_factors,
    diagnose_factors,
    factor_errors,
    pair_rows,
    rotary_system,
    solve_factors,
)
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.model.family import KINDS
from ckpt_prune.scoring.rotary_scores import ROTARY_SCORES, bare_errors, refitted_errors
from ckpt_prune.scoring.selection import select_in_heads
from ckpt_prune.stages.spaces.solvers.heads import HeadSolver


class RotarySolver(HeadSolver[RotaryMoments]):
    """Solves sites whose units are rotary pairs, as many in every KV head."""

    collects = "rotary"
    moments_type = RotaryMoments

    @property
    def has_effects(self) -> bool:
        return self.settings.compensation.method == "factors"

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Return how many samples have as many pairs of tokens as two unknowns a pair take."""
        return -(-2 * kept // tokens**2), f"{2 * kept} unknowns of a head"

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        return {"score": "obs", "compensation": {"method": "factors", "lambda": 0.001}}

    @phase("ranking")
    def scores(self, block: int, tensors: Tensors, folds: SpaceMoments, score: str | None = None) -> Tensor:
        """Return the scores of the pairs of every KV head, (KV heads, pairs) float64."""
        query, key = (tensors[self.model.tensor(block, module)].to(self.device) for module in self.description.readers)
        moments, pairs, layout = self._moments(folds), self.model.units(self.space, block), self.description.pairs
        every = torch.arange(pairs).expand(self.model.copies(self.space), -1).to(self.device)
        rows = pair_rows(every, pairs, self.model.dimension("group"), layout).view(len(every), -1, pairs, 2)
        of_query = query[rows.transpose(1, 2)]
        of_key = key[pair_rows(every, pairs, 1, layout)]
        function = ROTARY_SCORES[score or self.settings.score].function
        return function(of_query, of_key, sum_folds(moments) if moments else None)

    def errors(
        self, block: int, tensors: Tensors, folds: SpaceMoments, scores: Tensor, fisher: Fisher | None = None
    ) -> Tensor:
        """Return the squared errors of the logits; every pair that stays is refitted if the recipe does so."""
        moments = sum_folds(self._moments(folds))
        curve = bare_errors if self.settings.compensation.method == "none" else refitted_errors
        return self._over_heads(curve(moments, scores.to(self.device)) / moments.samples, fisher)

    def select(self, scores: Tensor, keep: int) -> Tensor:
        return select_in_heads(scores.view(self.model.copies(self.space), -1), keep)

    def _compensate(
        self, plan: SitePlan, tensors: Tensors, kept: Tensor, folds: tuple[RotaryMoments, ...], planned: SitePlan | None
    ) -> dict[str, Tensor]:
        pairs = self.model.units(self.space, plan.block)
        factors = self._fit(plan, kept, folds, planned) if folds else None
        new: dict[str, Tensor] = {}
        query, key = self.description.readers
        for module, absorbed, copies in ((query, factors, self.model.dimension("group")), (key, None, 1)):
            if module not in self.description.list_rewritten(plan.method):
                continue
            for name in (self.model.tensor(plan.block, module, kind) for kind in KINDS):
                if name in tensors:
                    rows = tensors[name].to(self.device)
                    new[name] = absorb_factors(rows, absorbed, kept, pairs, copies, self.description.pairs).cpu()
        return new

    def _fit(
        self, plan: SitePlan, kept: Tensor, folds: Sequence[RotaryMoments], planned: SitePlan | None
    ) -> Tensor | None:
        units, summed = self.settings.compensation.lambda_units, sum_folds(folds)
        system = rotary_system(summed, kept)
        factors: Tensor | None = None
        errors, held_out = system.dropped_energy, None

        def choose(grid: Sequence[float]) -> StrengthChoice:
            return choose_factors(folds, kept, grid, units)

        if plan.method != "none":
            held_out = self._settle_strength(plan, planned, len(folds), choose)
            factors = solve_factors(system, absolute_logit_strength(plan.strength or 0.0, units, system.diagonal_mean))
            errors = factor_errors(system, factors)
        if self._enter_errors(plan, system, errors):
            self._enter_diagnostics(plan, system, errors, diagnose_factors(system, errors), summed.samples)
            self._enter_held_out(plan, held_out, len(folds), choose)
        return factors
