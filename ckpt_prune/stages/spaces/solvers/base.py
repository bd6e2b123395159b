"""What every solver of sites does."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ckpt_prune.compensation.shift import Shift
from ckpt_prune.job.decisions import Decision
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.records import SiteShift
from ckpt_prune.job.space_recipe import SpaceRecipe
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName, expert_of, recipe_space

NO_FOLDS = "a choice on held-out folds needs statistics with at least two: calibrate with --folds 4"

SolvedSite = tuple[SitePlan, dict[str, Tensor] | None]
"""A site's plan, and the new tensors of the modules that compensation rewrites: float64, a bias complete; None where
nothing is dropped."""


@dataclass(frozen=True)
class Solver(ABC):
    """Solves the sites of one space of one model.

    Args:
        model: the dense model.
        recipe: scores and compensation.
        space: which of its spaces.
        device: where the closed forms are solved, in float64.
        diagnostics: also compute CORP's errors, spectra and held-out errors.
    """

    model: Model
    recipe: Recipe
    space: SpaceName
    device: torch.device
    diagnostics: bool = False

    collects: ClassVar[str]
    """Kind of moments, beside vectors, that effects are measured with."""

    @property
    def own(self) -> SpaceRecipe:
        """What the recipe says of the space."""
        return self.recipe.spaces[self.space]

    @property
    def description(self) -> Any:
        """The family's description of the space."""
        return self.model.family.spaces[self.space]

    @property
    def tried_out(self) -> bool:
        """Whether effects that are measured or predicted by `trial` are those of the recipe's compensation."""
        return True

    def tensors(self, block: int) -> list[str]:
        """On-disk names of what a site is solved from; a bias may be absent."""
        return [self.model.tensor(block, module, kind) for module in self.description.solved_from for kind in KINDS]

    def read(self, block: int) -> dict[str, Tensor]:
        """The dense model's tensors that a site is solved from."""
        checkpoint = self.model.checkpoint
        return checkpoint.read([name for name in self.tensors(block) if name in checkpoint.tensors])

    @abstractmethod
    def scores(
        self, block: int, tensors: Mapping[str, Tensor], folds: SpaceMoments, score: str | None = None
    ) -> Tensor:
        """What `solve` ranks the units of a site by.

        Args:
            block: index of the block.
            tensors: at least those that `tensors` names and the block has.
            folds: moments, one for each fold.
            score: in place of the recipe's.
        """

    @abstractmethod
    def errors(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        scores: Tensor,
        fisher: Fisher | None = None,
    ) -> Tensor:
        """What dropping the units of least score costs once the others make up for them as well as they can.

        Args:
            block: index of the block.
            tensors: at least those that `tensors` names and the block has.
            folds: moments, one for each fold, with what `collects` names.
            scores: as `scores` gives them.
            fisher: the metric at the site; None counts errors of its own output instead.

        Returns:
            For k = 0 … n units dropped (of q and k, of every head), float64, never decreasing: with the metric the
            divergence of the model's output from its own (`statistics.fisher`), the mean over samples; without, the
            error on a scale of its own.
        """

    def tried_errors(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        counts: Sequence[int],
        errors: Tensor,
        fisher: Fisher,
    ) -> list[float]:
        """What the metric predicts of so many units dropped as `trial` drops them.

        Args:
            block: index of the block.
            tensors: at least those that `tensors` names and the block has.
            folds: moments, one for each fold.
            counts: units dropped.
            errors: of the recipe's compensation, as `errors` gives them with the metric.
            fisher: the metric.

        Returns:
            A divergence for each count: where nothing better is known, that of the recipe's compensation.
        """
        return [float(errors[count]) for count in counts]

    @abstractmethod
    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Units of a site that stay, ascending, when so many do (of q and k, in every head)."""

    @abstractmethod
    def solve(
        self, block: int, tensors: Mapping[str, Tensor], moments: SpaceMoments | None, decision: Decision
    ) -> SolvedSite:
        """Select and compensate.

        Args:
            block: index of the block.
            tensors: at least those that `tensors` names and the block has.
            moments: one for each fold, or None where the recipe needs none.
            decision: what is settled already.

        Raises:
            UserError: a strength is to be chosen on folds and there is one only, or statistics lack what the method
                needs.
        """

    def divergence(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        solved: SolvedSite,
        fisher: Fisher,
    ) -> float | None:
        """What a solved site is predicted to do to the model's own output, the mean over samples.

        Args:
            block: index of the block.
            tensors: what it was solved from.
            folds: moments, one for each fold.
            solved: as `solve` returns it.
            fisher: the metric at the site.

        Returns:
            None where the moments do not tell. Of logits they tell errors alone, and of whole experts nothing: there
            it is known only that dropping nothing does nothing.
        """
        return 0.0 if solved[1] is None else None

    def shifted(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        others: SpaceMoments,
        solved: SolvedSite,
    ) -> SiteShift | None:
        """What a solved site that dropped something loses on other samples.

        Args:
            block: index of the block.
            tensors: what it was solved from.
            folds: moments that it was solved from, one for each fold.
            others: moments of the other samples, of the same kinds.
            solved: as `solve` returns it.

        Returns:
            None where the moments do not tell: of whole experts.
        """
        return None

    def refitted(self, count: int) -> list[SpaceName]:
        """Spaces whose consumers are fitted once more when the block has lost all that goes; none but of experts.

        Args:
            count: units of this space that stay.
        """
        return []

    def refit(
        self, block: int, tensors: Mapping[str, Tensor], moments: Mapping[SpaceName, SpaceMoments]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """These consumers, fitted to what the block lacks.

        Args:
            block: its index.
            tensors: of the block without what went.
            moments: of each of these spaces, with what the block lacks as drift; one for each fold.

        Returns:
            New weights, float64, and what the plan of the site says of them.

        Raises:
            UserError: a strength is to be chosen on folds, and there is one only.
        """
        raise ValueError(f"nothing of {self.space} is fitted once more")

    @abstractmethod
    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Samples of so many tokens that determine a fit without strength, and the unknowns in words."""

    @classmethod
    @abstractmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """Score and compensation by which effects of single sites are measured (`stages.spaces.effects`).

        Any sound compensation will do, and the same one for all sites.

        Args:
            biased: whether the module whose moments are measured has a bias.
        """

    @staticmethod
    def _shift(found: Shift, error: float, freedom: float, tokens: int) -> SiteShift:
        """A shift as records have it, of a site with so much error on the other samples."""
        energy = found.energy or math.inf
        told = {
            "uncompensated": found.uncompensated / energy,
            "test": error / energy,
            "floor": found.floor / energy,
            "covariances": found.covariances,
            "means": found.means,
            "smallest": found.smallest,
            "bound": None if found.bound is None else found.bound / energy,
        }
        finite = {key: None if value == math.inf else value for key, value in told.items()}
        return SiteShift(**finite, freedom=freedom, tokens=tokens)

    def _plan(self, block: int, consumer: str | None, kept: Tensor, scores: Tensor) -> SitePlan:
        return SitePlan(
            block=block,
            space=recipe_space(self.space),
            expert=expert_of(self.space),
            consumer=consumer,
            units=scores.numel(),
            kept=kept.tolist(),
            scores=[float(f"{s:.6g}") for s in scores.tolist()],
            method="none",
        )
