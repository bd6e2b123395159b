"""Sites whose units are whole experts of a block."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from ckpt_prune.calibration.fisher import Fisher
from ckpt_prune.calibration.kinds import SpaceMoments
from ckpt_prune.calibration.moments import total
from ckpt_prune.calibration.routing import RoutingMoments
from ckpt_prune.planning.selection import select
from ckpt_prune.scoring.expert_scores import EXPERT_SCORES
from ckpt_prune.transform.decisions import Decision
from ckpt_prune.transform.solvers.base import SolvedSite, Solver


class ExpertSolver(Solver):
    """Drops whole experts with their rows of the router. Tokens that went there go to the next best that stay."""

    collects = "moments"

    def scores(
        self, block: int, tensors: Mapping[str, Tensor], folds: SpaceMoments, score: str | None = None
    ) -> Tensor:
        """Scores of the experts, (experts,) float64."""
        own = tuple(each for each in folds if isinstance(each, RoutingMoments))
        return EXPERT_SCORES[score or self.own.score].function(total(own))

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
        """The experts of highest score."""
        return select(scores, keep)

    def solve(
        self, block: int, tensors: Mapping[str, Tensor], moments: SpaceMoments | None, decision: Decision
    ) -> SolvedSite:
        """Select experts; what stays is as it was."""
        scores = decision.scores if decision.scores is not None else self.scores(block, tensors, moments or ())
        kept = self.select(scores, decision.keep) if decision.kept is None else decision.kept
        return self._plan(block, None, kept, scores), None if len(kept) == len(scores) else {}

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """There are no unknowns."""
        return 1, "0 unknowns"

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """Never tried out."""
        return {"score": "routed-energy"}
