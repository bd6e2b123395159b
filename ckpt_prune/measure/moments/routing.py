"""Moments of what a router does with the tokens of a layer, and of what its experts make of them; they add."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.sums import Sums


@dataclass(frozen=True)
class RoutingMoments(Sums):
    """Sums over the tokens that a router sends to each of E experts, (E,) float64.

    Attributes:
        tokens: how many.
        mass: Σ w, the router's weights.
        norm: Σ w ‖y‖, y being the output of the expert.
        energy: Σ w² ‖y‖².
        share: Σ w ‖y‖ / Σ_k w_k, over the experts k that see the token.
    """

    tokens: Tensor
    mass: Tensor
    norm: Tensor
    energy: Tensor
    share: Tensor

    @classmethod
    def zeros(cls, experts: int, device: torch.device | str = "cpu") -> Self:
        return cls(*(torch.zeros(experts, dtype=torch.float64, device=device) for _ in fields(cls)))

    def accumulate(self, expert: int, weights: Tensor, outputs: Tensor, sums: Tensor) -> None:
        """Add tokens of one expert in place.

        Args:
            weights: the router's, (N, 1).
            outputs: weighted by them, (N, hidden).
            sums: of the weights of all experts that see a token, (N,).
        """
        squares = outputs.double().square().sum(1)
        self.tokens[expert] += len(outputs)
        self.mass[expert] += weights.double().sum()
        self.norm[expert] += squares.sqrt().sum()
        self.energy[expert] += squares.sum()
        self.share[expert] += (squares.sqrt() / sums.double()).sum()

    @property
    def is_finite(self) -> bool:
        """True if no output was NaN or Inf."""
        return all_finite(self.energy)
