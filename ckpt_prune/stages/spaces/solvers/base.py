"""The base of all solvers of sites."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ckpt_prune.job.decisions import SiteDecision
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName, expert_of, recipe_space
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.space_recipe import SpaceRecipe

NO_FOLDS = "a choice on held-out folds needs statistics with at least two: calibrate with --folds 4"

SolvedSite = tuple[SitePlan, dict[str, Tensor] | None]
"""A site's plan, and the new tensors of the modules that compensation rewrites: float64, with complete biases; None if
nothing is dropped."""


@dataclass(frozen=True)
class Solver(ABC):
    """Solves the sites of one space of one model.

    In all methods, `block` is the index of a block, and `folds` are moments of the site, one for each fold. `tensors`
    are by on-disk name, at least those of the block that the method `tensors` names.

    Args:
        device: where the closed forms are solved, in float64.
        diagnostics: also compute CORP's errors, spectra and held-out errors.
    """

    model: Model
    recipe: Recipe
    space: SpaceName
    device: torch.device
    diagnostics: bool = False

    collects: ClassVar[str]
    """The kind of moments, besides vectors, that effects are measured with."""

    @property
    def settings(self) -> SpaceRecipe:
        return self.recipe.spaces[self.space]

    @property
    def description(self) -> Any:
        """The family's description of the space."""
        return self.model.family.spaces[self.space]

    @property
    def has_effects(self) -> bool:
        """True if effects of `trial` are those of the recipe's compensation."""
        return True

    def tensors(self, block: int) -> list[str]:
        """Return on-disk names of what a site is solved from; a bias may be absent."""
        return [self.model.tensor(block, module, kind) for module in self.description.solved_from for kind in KINDS]

    def read(self, block: int) -> dict[str, Tensor]:
        """Return the dense model's tensors that a site is solved from."""
        checkpoint = self.model.checkpoint
        return checkpoint.read([name for name in self.tensors(block) if name in checkpoint.tensors])

    @abstractmethod
    def scores(self, block: int, tensors: Tensors, folds: SpaceMoments, score: str | None = None) -> Tensor:
        """Return the scores of the units of a site, by the recipe's score or the named one."""

    @abstractmethod
    def errors(
        self, block: int, tensors: Tensors, folds: SpaceMoments, scores: Tensor, fisher: Fisher | None = None
    ) -> Tensor:
        """Return the errors of dropping the units of least score while the others make up for them.

        Args:
            fisher: the metric at the site; None counts errors of its own output instead.

        Returns:
            For k = 0 … n units dropped (of q and k, in every head), float64, never decreasing. With the metric:
            divergences of the model's output (`statistics.fisher`), the mean over samples. Without: errors on a scale
            of their own.
        """

    def tried_errors(
        self, block: int, tensors: Tensors, folds: SpaceMoments, counts: Sequence[int], errors: Tensor, fisher: Fisher
    ) -> list[float]:
        """Return the divergences that the metric predicts of so many units dropped as `trial` drops them.

        `errors` are those of the recipe's compensation, as `errors` returns them with the metric, which are the answer
        if nothing better is known.
        """
        return [float(errors[count]) for count in counts]

    @abstractmethod
    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Return the units of a site that stay, ascending, if so many do (of q and k, in every head)."""

    @abstractmethod
    def solve(self, block: int, tensors: Tensors, folds: SpaceMoments | None, decision: SiteDecision) -> SolvedSite:
        """Select units and compensate; `folds` are None if the recipe needs no moments."""

    def divergence(self, tensors: Tensors, folds: SpaceMoments, solved: SolvedSite, fisher: Fisher) -> float | None:
        """Return the predicted effect of a solved site on the model's own output, the mean over samples.

        None if the moments cannot say: of logits they know errors only, and of whole experts nothing. That dropping
        nothing has no effect is always known.
        """
        return 0.0 if solved[1] is None else None

    def list_refitted(self, count: int) -> list[SpaceName]:
        """Return spaces whose consumers are fitted again after a block has lost all that goes, with `count` units left.

        Only experts have such spaces.
        """
        return []

    def refit(
        self, block: int, tensors: Tensors, moments: Mapping[SpaceName, SpaceMoments]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Fit these consumers to what the block lacks.

        Args:
            tensors: of the block without what went.
            moments: of each of these spaces, one for each fold, with what the block lacks as drift.

        Returns:
            New weights, float64, and figures for the plan of the site.
        """
        raise ValueError(f"nothing of {self.space} is fitted once more")

    @abstractmethod
    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Return how many samples of so many tokens determine a fit without strength, and its unknowns in words."""

    @classmethod
    @abstractmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """Return score and compensation that effects of single sites are measured with (`stages.spaces.effects`).

        Any sound compensation will do, and the same one for all sites. `biased` says whether the module whose moments
        are measured has a bias.
        """

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
