"""Scores of the experts of a block: higher = keep. Pure functions (scoring/README.md, section 7).

Each takes the moments of the experts, (E,) each, and returns (E,) float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Score:
    """The function of a score, and the statistics that it needs."""

    function: Callable[[RoutingMoments], Tensor]
    needs_moments: bool = True
    needs_gram: bool = False


EXPERT_SCORES: dict[str, Score] = {
    "routed-energy": Score(routed_energy),
    "frequency": Score(frequency),
    "reap": Score(reap),
}
