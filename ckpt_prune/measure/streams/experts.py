"""Experts of a block with linear modules of their own, where stock classes hold stacked weights.

The router's weight of a token multiplies the input of an expert's last linear module, not its output: for a module
without a bias that is the same. What is observed there is then weighted as the model weighs it, its outputs are what is
added to the block's, and so are gradients at them.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.parts import DOWN, GATE, UP, Experts
from ckpt_prune.common.errors import UserError

FEW = 8
"""An expert that saw fewer tokens than one for so many inputs of its last linear module has seen too few."""


class Expert(nn.Module):
    """One expert.

    Args:
        linears: role → linear module; without `up` the gate has its rows behind its own.
        activation: of the gate's output.
    """

    def __init__(self, linears: Mapping[str, nn.Linear], activation: Any) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        self.activation = activation

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Outputs for some tokens (N, hidden), weighted by (N, 1)."""
        inner = self.inner(self.gate(tokens), self.up(tokens) if UP in self._modules else None)  # type: ignore[operator]
        found: Tensor = self.down((inner * weights).to(inner.dtype))  # type: ignore[operator]
        return found

    def unseen(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """The same without whoever watches."""

        def apply(name: str, inputs: Tensor) -> Tensor:
            linear: Any = self.get_submodule(name)
            return nn.functional.linear(inputs, linear.weight, linear.bias)

        inner = self.inner(apply(GATE, tokens), apply(UP, tokens) if UP in self._modules else None)
        return apply(DOWN, (inner * weights).to(inner.dtype))

    def inner(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """What the last linear module reads, before the router's weight."""
        if up is None:
            gate, up = gate.chunk(2, dim=-1)
        found: Tensor = self.activation(gate) * up
        return found


class SplitExperts(nn.ModuleList):
    """All experts of a block.

    Args:
        experts: one for each.

    Attributes:
        routed: expert → the tokens of the last batch that the router sent to it, ascending.
        mass: expert → sum of the squared weights of its tokens in all batches.
        shown: experts that are shown all tokens, and at which weight; the router's then pass unseen.
        most: experts that see a token.
    """

    def __init__(self, experts: list[Expert]) -> None:
        super().__init__(experts)
        self.routed: dict[int, Tensor] = {}
        self.mass = [0.0] * len(experts)
        self.shown: Mapping[int, float] = {}
        self.most = 1

    def show(self, scales: Mapping[int, float]) -> None:
        """Show these experts all tokens from now on, at these weights, and none to whoever watches the others."""
        self.shown = scales

    def inputs(self, number: int) -> int:
        """Inputs of the last linear module of an expert."""
        linear: Any = self[number].get_submodule(DOWN)
        return int(linear.weight.shape[1])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of what the experts of every token (N, hidden) make of it."""
        total = torch.zeros_like(hidden_states)
        self.routed, self.most = {}, top_k_index.shape[1]
        expert: Any
        for number, expert in enumerate(self):
            token, place = torch.where(top_k_index == number)
            if number in self.shown:
                expert(hidden_states, hidden_states.new_full((len(hidden_states), 1), self.shown[number]))
            if not len(token):
                continue
            weights = top_k_weights[token, place, None]
            run = expert.unseen if number in self.shown else expert
            total = total.index_add(0, token, run(hidden_states[token], weights).to(total.dtype))
            self.routed[number] = token
            self.mass[number] += float(weights.detach().double().square().sum())
        return total


def split_experts(block: nn.Module, experts: Experts, family: str, count: int) -> None:
    """Put experts with linear modules of their own, on the meta device and without a size, into a stock block.

    Args:
        block: changed in place.
        experts: of the family.
        family: its `model_type`.
        count: of the experts.

    Raises:
        UserError: the stock class computes something else of gate and up.
    """
    stock: Any = block.get_submodule(experts.module)
    if not hasattr(stock, "act_fn"):
        raise UserError(f"the experts of {family} are not an activation of one projection times another")

    def linears() -> dict[str, nn.Linear]:
        return {name: nn.Linear(1, 1, bias=False, device="meta") for name in experts.roles.values()}

    made = SplitExperts([Expert(linears(), stock.act_fn) for _ in range(count)])
    owner, _, name = experts.module.rpartition(".")
    setattr(block.get_submodule(owner), name, made)


def too_few(tokens: Collection[int], inputs: int) -> bool:
    """Whether an expert saw too few tokens to measure on them.

    Args:
        tokens: of each fold.
        inputs: of its last linear module.
    """
    return min(tokens) == 0 or sum(tokens) * FEW < inputs
