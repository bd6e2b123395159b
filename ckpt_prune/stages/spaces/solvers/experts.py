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
from ckpt_prune.compensation.methods import METHODS, absolute_strength
from ckpt_prune.job.decisions import Decision
from ckpt_prune.job.selection import select_in_heads
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.routing import RoutingMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.model.spaces import SpaceName, expert_of
from ckpt_prune.scoring.expert_scores import EXPERT_SCORES
from ckpt_prune.stages.spaces.solvers.base import NO_FOLDS, SolvedSite, Solver


class ExpertSolver(Solver):
    """Drops whole experts with their rows of the router. Tokens that went there go to the next best that stay."""

    collects = "moments"

    @phase("ranking")
    def scores(
        self, block: int, tensors: Mapping[str, Tensor], folds: SpaceMoments, score: str | None = None
    ) -> Tensor:
        """Scores of the experts, (experts,) float64."""
        own = tuple(each for each in folds if isinstance(each, RoutingMoments))
        return EXPERT_SCORES[score or self.own.score].function(sum_folds(own))

    def errors(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        scores: Tensor,
        fisher: Fisher | None = None,
    ) -> NoReturn:
        """Not known: where tokens go whose expert is gone, moments of the dense model do not tell."""
        raise ValueError("errors of dropping whole experts are not known")

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """The experts of highest score, as many in every group of the router, so that none changes its group."""
        return select_in_heads(scores.view(self.model.expert_groups, -1), keep // self.model.expert_groups)

    def solve(
        self, block: int, tensors: Mapping[str, Tensor], moments: SpaceMoments | None, decision: Decision
    ) -> SolvedSite:
        """Select experts; what stays is as it was, until it is refitted on the tokens that it is sent then."""
        scores = decision.scores if decision.scores is not None else self.scores(block, tensors, moments or ())
        kept = self.select(scores, decision.keep) if decision.kept is None else decision.kept
        return self._plan(block, None, kept, scores), None if len(kept) == len(scores) else {}

    def refitted(self, count: int) -> list[SpaceName]:
        """Spaces of the experts that stay, which are numbered anew; none where the recipe leaves them as they are."""
        if not METHODS[self.own.compensation.method].uses_strength:
            return []
        spaces = self.model.family.spaces
        return [name for name in spaces if (expert := expert_of(name)) is not None and expert < count]

    def refit(
        self, block: int, tensors: Mapping[str, Tensor], moments: Mapping[SpaceName, SpaceMoments]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Last projections of the experts that stay, each fitted to its share of what the block lacks.

        See compensation/README.md, section 13.
        """
        own = self.own.compensation
        found: dict[str, Tensor] = {}
        strengths: set[float | None] = set()
        energy = before = after = 0.0
        for space, each in moments.items():
            name = self.model.tensor(block, self.model.family.columns[space].consumer)
            weight = tensors[name].to(self.device)
            folds = [m.to(self.device) for m in each if isinstance(m, Moments)]
            if own.by_folds and len(folds) < 2:
                raise UserError(NO_FOLDS)
            columns = torch.arange(weight.shape[1], device=self.device)
            blends = [blend_from_moments(weight, m, columns) for m in folds]
            blend, share, strength = reduce(add, blends), own.drift_shares[0], own.strength
            if own.by_folds:
                grid, shares = own.grid, own.drift_shares
                best = choose_form(
                    weight.double(), blends, [own.method], grid, shares, own.lambda_units, total=blend
                ).best
                share, strength = best.share, own.strength if best.strength is None else best.strength
            fit, target = blend.at(share), blend.at(1.0)
            solution = METHODS[own.method].fit(weight.double(), fit, absolute_strength(strength, own.lambda_units, fit))
            found[name] = solution.weight.cpu()
            strengths.add(strength)
            energy += target.second_moments()[2]
            before, after = (
                before + squared_error(Solution(weight.double()), target),
                after + squared_error(solution, target),
            )
        return found, {
            "method": own.method,
            "strength": strengths.pop() if len(strengths) == 1 else None,
            "error_uncompensated": before / energy if energy else None,
            "error_compensated": after / energy if energy else None,
        }

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Samples of which as many tokens reach every expert as its last projection has inputs."""
        consumers = self.refitted(1)
        if not consumers:
            return 1, "0 unknowns"
        inputs = self.model.units(consumers[0]) * self.model.unit_columns(consumers[0])
        experts = self.model.family.experts
        chosen = 1 if experts is None else int(getattr(self.model.config, experts.chosen))
        what = f"{inputs} inputs of the last projection of each of {kept} experts"
        return -(-inputs * kept // (tokens * chosen)), what

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """Never tried out."""
        return {"score": "routed-energy"}
