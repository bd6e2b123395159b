"""Additive moments of what a router does with the tokens of a layer, and of what its experts make of them."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.streams.experts import SplitExperts
from ckpt_prune.parallel.group import Group


@dataclass(frozen=True)
class RoutingMoments:
    """Sums over the tokens that a router sends to each of E experts, (E,) float64.

    Attributes:
        tokens: how many.
        mass: Σ w, the router's weights.
        norm: Σ w ‖y‖, y being the output of the expert.
        energy: Σ w² ‖y‖².
    """

    tokens: Tensor
    mass: Tensor
    norm: Tensor
    energy: Tensor

    @classmethod
    def zeros(cls, experts: int, device: torch.device | str = "cpu") -> Self:
        """Of no token."""
        return cls(*(torch.zeros(experts, dtype=torch.float64, device=device) for _ in fields(cls)))

    def accumulate(self, expert: int, weights: Tensor, outputs: Tensor) -> None:
        """Add tokens of one expert in place.

        Args:
            expert: which.
            weights: of the router, (N, 1).
            outputs: weighted by them, (N, hidden).
        """
        squares = outputs.double().square().sum(1)
        self.tokens[expert] += len(outputs)
        self.mass[expert] += weights.double().sum()
        self.norm[expert] += squares.sqrt().sum()
        self.energy[expert] += squares.sum()

    def __add__(self, other: "RoutingMoments") -> "RoutingMoments":
        """Sums over the tokens of both."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return RoutingMoments(**sums)

    def pooled(self, group: Group) -> "RoutingMoments":
        """Sums over the tokens of all processes, at the first one."""
        return RoutingMoments(**{each.name: group.add(getattr(self, each.name)) for each in fields(self)})

    @property
    def finite(self) -> bool:
        """Whether no output was NaN or Inf."""
        return all_finite(self.energy)

    def to(self, device: torch.device | str) -> "RoutingMoments":
        """The same sums on another device."""
        return replace(self, **{each.name: getattr(self, each.name).to(device) for each in fields(self)})


class Routing:
    """Accumulates what a block's router sends where.

    Args:
        experts: of the block.
        folds: moments to begin with, one for each fold.

    Attributes:
        fold: which one the tokens that come next belong to.
    """

    def __init__(self, experts: SplitExperts, folds: list[RoutingMoments]) -> None:
        self.fold, self._folds = 0, folds
        self._handles = [expert.register_forward_hook(self._watch(number)) for number, expert in enumerate(experts)]

    def _watch(self, number: int) -> Any:
        def see(_module: nn.Module, args: tuple[Tensor, Tensor], output: Tensor) -> None:
            self._folds[self.fold].accumulate(number, args[1].detach(), output.detach())

        return see

    def moments(self) -> tuple[RoutingMoments, ...]:
        """What was seen, on CPU; stops looking."""
        for handle in self._handles:
            handle.remove()
        return tuple(each.to("cpu") for each in self._folds)
