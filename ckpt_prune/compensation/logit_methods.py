"""Every way to make narrow queries and keys make up for what they lose, by name. Methods are listed without torch.

See compensation/README.md, sections 7 and 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_prune.compensation.methods import MethodFacts, Units, imported_when_called

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_prune.compensation.logit import LogitDiagnostics, LogitFit, LogitSystem, StrengthChoice
    from ckpt_prune.measure.moments.logits import LogitMoments


_CHOOSE, _DIAGNOSE = map(imported_when_called, ("logit:choose_strength", "logit:diagnose_fit"))


@dataclass(frozen=True, kw_only=True)
class LogitMethod(MethodFacts):
    """One way to narrow queries and keys. Kept dimensions are (H, d') int64, strengths zero or more.

    Attributes:
        fit: moments, their system at the kept dimensions, these, strength and its units → the factors.
        choose: moments of each fold, kept dimensions, strengths and their units → the best on held-out folds.
        diagnose: moments, their system and a fit, to these or to others → how far the form goes.
        width_errors: moments → logit errors for 0 … d dropped dimensions, (H, d + 1), never decreasing, if they are
            known for all at once; None if the energies of single dimensions stand for them.
        unknowns: dimensions, and kept ones → unknowns that a sample's Grams have to settle, as the sides of a matrix.
    """

    fit: Callable[[LogitMoments, LogitSystem, Tensor, float, Units], LogitFit]
    choose: Callable[[Sequence[LogitMoments], Tensor, Sequence[float], Units], StrengthChoice] = _CHOOSE
    diagnose: Callable[[LogitMoments, LogitSystem, LogitFit], LogitDiagnostics] = _DIAGNOSE
    width_errors: Callable[[LogitMoments], Tensor] | None = None
    unknowns: Callable[[int, int], tuple[int, int]] = lambda dims, kept: (kept, kept)


LOGIT_METHODS: dict[str, LogitMethod] = {
    method.name: method
    for method in (
        LogitMethod(
            name="none",
            summary="keep the surviving rows of q and k as they are",
            source="no compensation",
            fit=imported_when_called("logit:keep_dimensions"),
        ),
        LogitMethod(
            name="logit",
            summary="refit the attention logits on the kept dimensions, absorbed into q and k",
            source="CORP eq. 14-16",
            uses_strength=True,
            fit=imported_when_called("logit:refit_logits"),
        ),
        LogitMethod(
            name="low-rank",
            summary="the narrow q and k whose logits are nearest, whatever dimensions they mix",
            source="this project",
            uses_strength=True,
            fit=imported_when_called("low_rank:fit_low_rank"),
            choose=imported_when_called("low_rank:choose_low_rank"),
            diagnose=imported_when_called("low_rank:diagnose_low_rank"),
            width_errors=imported_when_called("low_rank:width_errors"),
            unknowns=lambda dims, kept: (dims, kept),
        ),
    )
}
"""Every compensation that a recipe may name for the dimensions of queries and keys."""
