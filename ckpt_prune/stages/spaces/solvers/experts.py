"""Sites whose units are whole experts of a block."""

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any, NoReturn

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.compensation.choice import choose_form
from ckpt_prune.compensation.fit import Solution, blend_from_moments, squared_error
from ckpt_prune.compensation.methods import METHODS, absolute_strength, derive_strength
from ckpt_prune.compensation.strength_walk import loses_to_none, unseen_errors
from ckpt_prune.job.decisions import SiteDecision
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.routing import RoutingMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.model.spaces import SpaceName, expert_of
from ckpt_prune.scoring.expert_scores import EXPERT_SCORES
from ckpt_prune.scoring.selection import select_in_heads
from ckpt_prune.stages.spaces.solvers.base import NO_FOLDS, SolvedSite, Solver


class ExpertSolver(Solver):
    """Drops whole experts with their rows of the router. Their tokens go to the next best experts that stay."""

    collects = "moments"

    @phase("ranking")
    def scores(self, block: int, tensors: Tensors, folds: SpaceMoments, score: str | None = None) -> Tensor:
        """Return the scores of the experts, (experts,) float64."""
        moments = tuple(each for each in folds if isinstance(each, RoutingMoments))
        return EXPERT_SCORES[score or self.settings.score].function(sum_folds(moments))

    def errors(
        self, block: int, tensors: Tensors, folds: SpaceMoments, scores: Tensor, fisher: Fisher | None = None
    ) -> NoReturn:
        """Errors are unknown: moments of the dense model do not say where tokens go whose expert is gone."""
        raise ValueError("errors of dropping whole experts are not known")

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Return the experts of highest score, as many in every group of the router, so that none changes its group."""
        return select_in_heads(scores.view(self.model.expert_groups, -1), keep // self.model.expert_groups)

    def solve(self, block: int, tensors: Tensors, folds: SpaceMoments | None, decision: SiteDecision) -> SolvedSite:
        """Select experts. Those that stay are refitted later, on the tokens that the router then sends them."""
        scores = decision.scores if decision.scores is not None else self.scores(block, tensors, folds or ())
        kept = self.select(scores, decision.keep) if decision.kept is None else decision.kept
        return self._plan(block, None, kept, scores), None if len(kept) == len(scores) else {}

    def list_refitted(self, count: int) -> list[SpaceName]:
        """Return spaces of the experts that stay, which are numbered anew; none if the recipe leaves them alone."""
        if not METHODS[self.settings.compensation.method].uses_strength:
            return []
        spaces = self.model.family.spaces
        return [name for name in spaces if (expert := expert_of(name)) is not None and expert < count]

    def refit(
        self, block: int, tensors: Tensors, moments: Mapping[SpaceName, SpaceMoments]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Fit the last projection of every expert that stays to its share of what the block lacks.

        See compensation/README.md, section 13.
        """
        settings = self.settings.compensation
        grid, shares, units = settings.grid, settings.drift_shares, settings.lambda_units
        new: dict[str, Tensor] = {}
        methods: set[str] = set()
        strengths: set[float | None] = set()
        energy = before = after = 0.0
        for space, each in moments.items():
            name = self.model.tensor(block, self.model.family.columns[space].consumer)
            weight = tensors[name].to(self.device)
            folds = [fold.to(self.device) for fold in each if isinstance(fold, Moments)]
            if settings.by_folds and len(folds) < 2:
                raise UserError(NO_FOLDS)
            columns = torch.arange(weight.shape[1], device=self.device)
            blends = [blend_from_moments(weight, fold, columns) for fold in folds]
            blend, share, method = reduce(add, blends), shares[0], settings.method
            strength: float | None = settings.strength
            unseen: list[float] = []
            if settings.by_folds:
                choice = choose_form(weight.double(), blends, [method], grid, shares, units, total=blend)
                share = choice.best.share
                strength = strength if choice.best.strength is None else choice.best.strength
            elif settings.by_rule:
                strength = derive_strength(len(columns), blend.fit.count)
                unseen = unseen_errors(METHODS[method], weight.double(), blends, blend, share, wide=False)
            fit, target = blend.at(share), blend.at(1.0)
            solution = METHODS[method].fit(weight.double(), fit, absolute_strength(strength or 0.0, units, fit))
            plain, error = squared_error(Solution(weight.double()), target), squared_error(solution, target)
            if plain and loses_to_none(error / plain, unseen):
                method, strength, error, solution = "none", None, plain, Solution(weight.double())
            new[name] = solution.weight.cpu()
            methods.add(method)
            strengths.add(strength)
            energy += target.second_moments()[2]
            before += plain
            after += error
        return new, {
            "method": "none" if methods == {"none"} else settings.method,
            "strength": strengths.pop() if len(strengths) == 1 else None,
            "error_uncompensated": before / energy if energy else None,
            "error_compensated": after / energy if energy else None,
        }

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Return how many samples send every expert as many tokens as its last projection has inputs."""
        consumers = self.list_refitted(1)
        if not consumers:
            return 1, "0 unknowns"
        inputs = max(self.model.unit_counts(consumers[0])) * self.model.unit_columns(consumers[0])
        experts = self.model.family.experts
        chosen = 1 if experts is None else int(getattr(self.model.config, experts.chosen))
        unknowns = f"{inputs} inputs of the last projection of each of {kept} experts"
        return -(-inputs * kept // (tokens * chosen)), unknowns

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        return {"score": "routed-energy"}
