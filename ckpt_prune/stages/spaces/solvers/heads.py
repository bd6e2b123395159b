"""Base of the solvers of sites that end in attention logits: one strength for all heads, errors head by head."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.compensation.logit import LogitDiagnostics, StrengthChoice
from ckpt_prune.job.decisions import SiteDecision
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.records import HeadErrors
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.logits import LogitMoments
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.scoring.selection import in_heads
from ckpt_prune.stages.spaces.solvers.base import NO_FOLDS, SolvedSite, Solver

HeadMoments = TypeVar("HeadMoments", LogitMoments, RotaryMoments)
Choose = Callable[[Sequence[float]], StrengthChoice]
"""Returns the best of a grid of strengths on held-out folds."""


class Energies(Protocol):
    """Squared logits of every query head, (H,) float64: of what is dropped, the error without compensation; of all."""

    @property
    def dropped_energy(self) -> Tensor: ...
    @property
    def energy(self) -> Tensor: ...


class HeadSolver(Solver, Generic[HeadMoments]):
    """Solves sites whose units are as many in every head, and whose errors are those of attention logits."""

    moments_type: ClassVar[type]

    def _moments(self, folds: SpaceMoments | None) -> tuple[HeadMoments, ...]:
        moments: Any = (fold for fold in folds or () if isinstance(fold, self.moments_type))
        return tuple(fold.to(self.device) for fold in moments)

    def solve(self, block: int, tensors: Tensors, folds: SpaceMoments | None, decision: SiteDecision) -> SolvedSite:
        """Select units of every head, and solve what makes up for the others in q and k.

        See compensation/README.md, sections 7 and 9.
        """
        scores = self.scores(block, tensors, folds or ()) if decision.scores is None else decision.scores
        kept = self.select(scores, decision.keep) if decision.kept is None else decision.kept
        plan = self._plan(block, None, kept, scores.flatten())
        if kept.numel() == scores.numel():
            return plan, None
        units = self.model.units(self.space, block)
        plan.method = self.settings.compensation.method
        by_head = in_heads(kept, scores.numel() // units, units).to(self.device)
        return plan, self._compensate(plan, tensors, by_head, self._moments(folds), decision.plan)

    @abstractmethod
    def _compensate(
        self, plan: SitePlan, tensors: Tensors, kept: Tensor, folds: tuple[HeadMoments, ...], planned: SitePlan | None
    ) -> dict[str, Tensor]:
        """Return the new tensors of q and k for kept units (heads, units), and enter the fit into the plan."""

    def _over_heads(self, lost: Tensor, fisher: Fisher | None) -> Tensor:
        """Return errors of all heads together: their sum, or the divergence that they make.

        Args:
            lost: squared errors a sample of every head, (H, widths) float64.
            fisher: a weight for each head; None counts the logits themselves.
        """
        return lost.sum(0).cpu() if fisher is None else (fisher.mean.to(lost.device) @ lost).cpu() / 2

    def _settle_strength(self, plan: SitePlan, planned: SitePlan | None, folds: int, choose: Choose) -> float | None:
        """Enter the strength: that of a given plan, of held-out folds, or of the recipe, in this order.

        Returns:
            The held-out error if the strength was chosen by it.
        """
        compensation = self.settings.compensation
        plan.strength = None if planned is None else planned.strength
        if plan.strength is None and compensation.lambda_by == "folds":
            if folds < 2:
                raise UserError(NO_FOLDS)
            choice = choose(compensation.grid)
            plan.strength = choice.value
            return choice.errors[choice.value]
        if plan.strength is None:
            plan.strength = compensation.strength
        return None

    def _enter_errors(self, plan: SitePlan, energies: Energies, errors: Tensor) -> bool:
        """Enter relative errors of all heads together, if there is any energy; return True if diagnostics follow."""
        energy = float(energies.energy.sum())
        if energy > 0:
            plan.error_uncompensated = float(energies.dropped_energy.sum()) / energy
            plan.error_compensated = float(errors.sum()) / energy
        return self.diagnostics and plan.error_uncompensated is not None

    def _enter_diagnostics(
        self, plan: SitePlan, energies: Energies, errors: Tensor, diagnostics: LogitDiagnostics, samples: int
    ) -> None:
        """Enter CORP's errors, a sample, and those of every head that has any energy."""
        energy = energies.energy
        plan.j0 = float(diagnostics.uncompensated.sum()) / samples
        plan.floor = float(diagnostics.floor.sum()) / samples
        plan.rho2 = 1 - plan.floor / plan.j0 if plan.j0 > 0 else 1.0
        plan.heads = [
            HeadErrors(
                head=head,
                error_uncompensated=float(diagnostics.uncompensated[head] / energy[head]),
                error_compensated=float(errors[head] / energy[head]),
                floor=float(diagnostics.floor[head] / energy[head]),
                rho2=float(diagnostics.rho2[head]),
            )
            for head in range(len(energy))
            if energy[head] > 0
        ]

    def _enter_held_out(self, plan: SitePlan, known: float | None, folds: int, choose: Choose) -> None:
        """Enter the held-out error of the plan's strength: `known` if the strength was chosen by it, else measured."""
        if folds < 2:
            return
        if plan.strength is None:
            plan.error_held_out = plan.error_uncompensated
        else:
            plan.error_held_out = choose([plan.strength]).errors[plan.strength] if known is None else known
