"""Scores of the experts of a block: higher = keep. Pure functions (scoring/README.md, section 7).

Each takes the moments of the experts, (E,) each, and returns (E,) float64. Scores are listed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_prune.scoring.scores import Score

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_prune.measure.moments.routing import RoutingMoments


def routed_energy(moments: RoutingMoments) -> Tensor:
    """Σ_t w_t² ‖y_t‖², what the expert adds to the stream: how often it is chosen, at which weights, and how much."""
    return moments.energy


def frequency(moments: RoutingMoments) -> Tensor:
    """Tokens that the router sends to the expert."""
    return moments.tokens


def reap(moments: RoutingMoments) -> Tensor:
    """Mean of w_t ‖y_t‖ over the tokens that the router sends to the expert; 0 where there are none."""
    return moments.norm / moments.tokens.clamp_min(1)


def reap_renormalised(moments: RoutingMoments) -> Tensor:
    """`reap` with the router's weights of a token divided by their sum, whatever its class does (REAP's later code)."""
    return moments.share / moments.tokens.clamp_min(1)


EXPERT_SCORES: dict[str, Score] = {
    "routed-energy": Score(routed_energy),
    "frequency": Score(frequency),
    "reap": Score(reap),
    "reap-renormalised": Score(reap_renormalised),
}
