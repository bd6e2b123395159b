"""Scores of the dimensions inside a head that q and k share: higher = keep (scoring/README.md, section 4).

Each takes the query and key weights (H d, hidden), the moments of queries and keys, and H, and returns (H, d) float64.
Scores are listed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_prune.scoring.scores import Score

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_prune.measure.moments.logits import LogitMoments


def logit_energy(query: Tensor, key: Tensor, moments: LogitMoments | None, heads: int) -> Tensor:
    """E_b[‖q_j‖² ‖k_j‖²], the mean over samples b (CORP section 3.3)."""
    if moments is None:
        raise ValueError("logit-energy needs moments")
    return moments.logit_energy()


def magnitude(query: Tensor, key: Tensor, moments: LogitMoments | None, heads: int) -> Tensor:
    """‖W_Q,j‖₂ ‖W_K,j‖₂. It needs no moments."""
    norms = [weight.double().square().sum(1).sqrt().view(heads, -1) for weight in (query, key)]
    return norms[0] * norms[1]


LOGIT_SCORES: dict[str, Score] = {
    "logit-energy": Score(logit_energy),
    "magnitude": Score(magnitude, needs_moments=False),
}
