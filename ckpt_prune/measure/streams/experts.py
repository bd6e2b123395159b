"""Experts of a block with linear modules of their own; stock classes hold stacked weights.

The router's weight of a token multiplies the input of an expert's last linear module, not its output, and its bias
beside it, which is the same. What is observed there is then weighted as the model weighs it. Outputs are what is added
to the block's, and so are gradients at them.
"""

from collections.abc import Collection, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.expert_classes import Inner, find_inner
from ckpt_prune.model.family_keys import DOWN, GATE, SHIFT, UP, Experts

FEW = 8
"""An expert has seen too few tokens if there are fewer than one for so many inputs of its last linear module."""


class Expert(nn.Module):
    """One expert.

    Args:
        linears: role → linear module; without `up` the gate's has all rows.
        inner: of their outputs.
    """

    def __init__(self, linears: Mapping[str, nn.Linear], inner: Inner) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        self.inner = inner

    def forward(self, tokens: Tensor, weights: Tensor, *, unseen: bool = False) -> Tensor:
        """Return outputs for tokens (N, hidden), weighted by (N, 1). If `unseen`, linear modules run no hooks."""

        def apply(role: str, inputs: Tensor) -> Tensor:
            linear: Any = self.get_submodule(role)
            outputs: Tensor = linear.forward(inputs) if unseen else linear(inputs)
            return outputs

        halves = [apply(role, tokens) for role in (GATE, UP) if role in self._modules]
        inner = self.inner(torch.cat(halves, -1))
        outputs = apply(DOWN, (inner * weights).to(inner.dtype))
        shift: Tensor | None = getattr(self.get_submodule(DOWN), SHIFT, None)
        return outputs if shift is None else outputs + (shift * weights).to(outputs.dtype)


class SplitExperts(nn.ModuleList):
    """All experts of a block.

    Args:
        experts: one for each.

    Attributes:
        routed: expert → the tokens of the last batch that the router sent to it, ascending.
        sums: expert → the sum of the weights of each of these tokens over all its experts.
        mass: expert → sum of the squared weights of its tokens in all batches.
        shown: experts that are shown all tokens, and at which weight; hooks do not see the router's tokens then.
        most: experts that see a token.
    """

    def __init__(self, experts: list[Expert]) -> None:
        super().__init__(experts)
        self.routed: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        self.mass = [0.0] * len(experts)
        self.shown: Mapping[int, float] = {}
        self.most = 1

    def count_inputs(self, number: int) -> int:
        """Count the inputs of the last linear module of an expert."""
        linear: Any = self[number].get_submodule(DOWN)
        return int(linear.weight.shape[1])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of every token's experts, (N, hidden)."""
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
            self.sums[number] = top_k_weights[token].sum(1)
            # `forward`, so that hooks on the expert itself do not run either.
            run = partial(expert.forward, unseen=True) if number in self.shown else expert
            total = total.index_add(0, token, run(hidden_states[token], weights).to(total.dtype))
            self.routed[number] = token
            self.mass[number] += float(weights.detach().double().square().sum())
        return total


class SortedExperts(SplitExperts):
    """Experts of a class that weighs tokens before them, and hands all tokens to each, at zero to most (Llama 4)."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Return the outputs of every expert, (experts · N, hidden), for tokens of the same shape."""
        given = hidden_states.view(len(self), -1, hidden_states.shape[-1])
        outputs = torch.zeros_like(given)
        self.routed, self.most = {}, 1
        expert: Any
        for number, expert in enumerate(self):
            if number in self.shown:
                expert(given[number], given.new_full((given.shape[1], 1), self.shown[number]))
            token = given[number].abs().sum(-1).nonzero().flatten()
            if not len(token):
                continue
            self.sums[number] = given.new_ones(len(token))
            run = partial(expert.forward, unseen=True) if number in self.shown else expert
            outputs[number, token] = run(given[number, token], given.new_ones((len(token), 1)))
            self.routed[number] = token
            self.mass[number] += float(len(token))
        return outputs.view(hidden_states.shape)


def split_experts(block: nn.Module, experts: Experts, family: str, count: int) -> None:
    """Put experts with linear modules of their own, on the meta device and without a size, into a stock block."""
    stock: Any = block.get_submodule(experts.module)
    inner = find_inner(stock)
    if inner is None:
        raise UserError(f"the experts of {family} are not an activation of one projection times another")

    def make_expert() -> Expert:
        linears = {role: nn.Linear(1, 1, bias=False, device="meta") for role in experts.roles.values()}
        return Expert(linears, inner)

    owner, _, name = experts.module.rpartition(".")
    kind = SortedExperts if len(signature(stock.forward).parameters) == 1 else SplitExperts
    setattr(block.get_submodule(owner), name, kind([make_expert() for _ in range(count)]))


def saw_too_few(tokens: Collection[int], inputs: int) -> bool:
    """Return True if an expert saw too few tokens (of each fold) for the inputs of its last linear module."""
    return min(tokens) == 0 or sum(tokens) * FEW < inputs
