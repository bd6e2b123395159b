"""What sites that end in attention logits share: a strength for all heads, and errors head by head."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.compensation.logit import LogitDiagnostics, StrengthChoice
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.records import HeadErrors
from ckpt_prune.job.space_recipe import Compensation
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.stages.spaces.solvers.base import NO_FOLDS

Choose = Callable[[Sequence[float]], StrengthChoice]
"""The best of a grid of strengths on held-out folds."""


class Energies(Protocol):
    """Squared logits of every query head, (H,) float64."""

    @property
    def dropped_energy(self) -> Tensor:
        """Of what is dropped: the error without compensation."""

    @property
    def energy(self) -> Tensor:
        """Of everything."""


def over_heads(lost: Tensor, fisher: Fisher | None) -> Tensor:
    """Errors of all heads together: their sum, or the divergence that they make.

    Args:
        lost: squared errors a sample of every head, (H, widths) float64.
        fisher: a weight for each head; None counts the logits themselves.
    """
    return lost.sum(0).cpu() if fisher is None else (fisher.mean.to(lost.device) @ lost).cpu() / 2


def settle_strength(
    plan: SitePlan, own: Compensation, settled: SitePlan | None, folds: int, choose: Choose
) -> float | None:
    """Enter the strength of a plan that is settled, of held-out folds, or of the recipe, in this order.

    Returns:
        The held-out error where the strength was chosen by it.

    Raises:
        UserError: it is to be chosen on folds and there is one only.
    """
    plan.strength = None if settled is None else settled.strength
    if plan.strength is None and own.lambda_by == "folds":
        if folds < 2:
            raise UserError(NO_FOLDS)
        assert own.lambda_grid is not None
        choice = choose(own.lambda_grid)
        plan.strength = choice.value
        return choice.errors[choice.value]
    if plan.strength is None:
        plan.strength = own.strength
    return None


def enter_errors(plan: SitePlan, energies: Energies, errors: Tensor) -> None:
    """Enter relative errors of all heads together, where there is any energy."""
    energy = float(energies.energy.sum())
    if energy > 0:
        plan.error_uncompensated = float(energies.dropped_energy.sum()) / energy
        plan.error_compensated = float(errors.sum()) / energy


def enter_diagnostics(
    plan: SitePlan, energies: Energies, errors: Tensor, found: LogitDiagnostics, samples: int
) -> None:
    """Enter CORP's errors, a sample, and those of every head that has any energy."""
    energy = energies.energy
    plan.j0 = float(found.uncompensated.sum()) / samples
    plan.floor = float(found.floor.sum()) / samples
    plan.rho2 = 1 - plan.floor / plan.j0 if plan.j0 > 0 else 1.0
    plan.heads = [
        HeadErrors(
            head=head,
            error_uncompensated=float(found.uncompensated[head] / energy[head]),
            error_compensated=float(errors[head] / energy[head]),
            floor=float(found.floor[head] / energy[head]),
            rho2=float(found.rho2[head]),
        )
        for head in range(len(energy))
        if energy[head] > 0
    ]


def enter_held_out(plan: SitePlan, known: float | None, folds: int, choose: Choose) -> None:
    """Enter the held-out error of the plan's strength, where there are folds to hold out.

    Args:
        plan: with its strength; None where nothing is fitted.
        known: the error, if the strength was chosen by it.
        folds: how many.
        choose: measures it otherwise.
    """
    if folds < 2:
        return
    if plan.strength is None:
        plan.error_held_out = plan.error_uncompensated
    else:
        plan.error_held_out = choose([plan.strength]).errors[plan.strength] if known is None else known
