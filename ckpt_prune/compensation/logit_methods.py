"""Every way to make narrow queries and keys make up for what they lose, by name.

See compensation/README.md, sections 7 and 8.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.compensation import logit, low_rank
from ckpt_prune.compensation.logit import LogitDiagnostics, LogitSystem, StrengthChoice
from ckpt_prune.compensation.methods import MethodFacts, Units
from ckpt_prune.compensation.mixing import mix_dimensions, selection_matrix
from ckpt_prune.measure.moments.logits import LogitMoments


@dataclass(frozen=True)
class LogitFit:
    """What a method makes of the queries and keys of a layer: q' = Pᵀq and k' = Qᵀk, head by head.

    Attributes:
        left: P, (H, d, d') float64.
        right: Q, likewise.
        errors: Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖² on what it was fitted to, (H,) float64.
        residual: of the equations that were solved, relative; None where there are none.
    """

    left: Tensor
    right: Tensor
    errors: Tensor
    residual: float | None = None


@dataclass(frozen=True)
class LogitMethod(MethodFacts):
    """One way to narrow queries and keys. Kept dimensions are (H, d') int64, strengths zero or more.

    Attributes:
        fit: moments, their system at the kept dimensions, these, strength and its units → what comes of it.
        choose: moments of each fold, kept dimensions, strengths and their units → the best on held-out folds.
        diagnose: moments, their system and a fit, to these or to others → how far the form goes.
        width_errors: moments → logit errors for 0 … d dropped dimensions, (H, d + 1), never decreasing, where they are
            known for all at once; None where the energies of single dimensions stand for them.
        unknowns: dimensions, and kept ones → unknowns that a sample's Grams have to settle, as the sides of a matrix.
        freedom: dimensions, and kept ones → numbers that it is free to choose for a head (RCPU, section 4.2).
        bounded: whether it solves, at most, CORP's equations, so that Proposition C.2.3 speaks of it.
    """

    fit: Callable[[LogitMoments, LogitSystem, Tensor, float, Units], LogitFit]
    choose: Callable[[Sequence[LogitMoments], Tensor, Sequence[float], Units], StrengthChoice]
    diagnose: Callable[[LogitMoments, LogitSystem, LogitFit], LogitDiagnostics]
    width_errors: Callable[[LogitMoments], Tensor] | None = None
    unknowns: Callable[[int, int], tuple[int, int]] = lambda dims, kept: (kept, kept)
    freedom: Callable[[int, int], int] = lambda dims, kept: kept**2
    bounded: bool = True


def _bare(moments: LogitMoments, system: LogitSystem, kept: Tensor, value: float, units: Units) -> LogitFit:
    chosen = selection_matrix(kept, moments.head_dim)
    return LogitFit(chosen, chosen, system.dropped_energy.clamp_min(0))


def _no_choice(*_: object) -> StrengthChoice:
    raise ValueError("there is no strength to choose")


def _logit(moments: LogitMoments, system: LogitSystem, kept: Tensor, value: float, units: Units) -> LogitFit:
    solution = logit.solve_logit(system, logit.absolute_logit_strength(value, units, system.diagonal_mean))
    left, right = mix_dimensions(solution.M, kept, moments.head_dim)
    return LogitFit(left, right, logit.logit_error(system, solution.M), float(solution.residual.max()))


def _low_rank(moments: LogitMoments, system: LogitSystem, kept: Tensor, value: float, units: Units) -> LogitFit:
    selected = _logit(moments, system, kept, value, units)
    found = low_rank.solve_low_rank(moments, kept.shape[1], value, units, (selected.left, selected.right))
    return LogitFit(found.left, found.right, found.errors)


def _diagnosed(moments: LogitMoments, system: LogitSystem, fit: LogitFit) -> LogitDiagnostics:
    return logit.diagnose_logit(system)


def _low_rank_diagnosed(moments: LogitMoments, system: LogitSystem, fit: LogitFit) -> LogitDiagnostics:
    return low_rank.diagnose_low_rank(moments, system, fit.left, fit.right)


LOGIT_METHODS: dict[str, LogitMethod] = {
    method.name: method
    for method in (
        LogitMethod(
            "none",
            "keep the surviving rows of q and k as they are",
            "no compensation",
            False,
            False,
            False,
            _bare,
            _no_choice,
            _diagnosed,
            freedom=lambda dims, kept: 0,
        ),
        LogitMethod(
            "logit",
            "refit the attention logits on the kept dimensions, absorbed into q and k",
            "CORP eq. 14-16",
            False,
            True,
            False,
            _logit,
            logit.choose_strength,
            _diagnosed,
        ),
        LogitMethod(
            "low-rank",
            "the narrow q and k whose logits are nearest, whatever dimensions they mix",
            "this project",
            False,
            True,
            False,
            _low_rank,
            low_rank.choose_low_rank,
            _low_rank_diagnosed,
            low_rank.width_errors,
            lambda dims, kept: (dims, kept),
            # Matrices (d, d) of rank d': two factors, less what may pass between them.
            lambda dims, kept: 2 * dims * kept - kept**2,
            bounded=False,
        ),
    )
}
"""Every compensation that a recipe may name for the dimensions of queries and keys."""


def fit_unmeasured(kept: Tensor, dims: int) -> LogitFit:
    """What is left of queries and keys of which nothing was measured."""
    chosen = selection_matrix(kept, dims)
    return LogitFit(chosen, chosen, torch.zeros(len(kept), dtype=torch.float64, device=kept.device))
