"""Experts of which each sees every token, at a weight of zero where the router does not send it there."""

from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.family import Family


class OpenExpert(nn.Module):
    """One expert, from stacked weights."""

    def __init__(self, stacked: Any, number: int) -> None:
        super().__init__()
        gate, up = stacked.gate_up_proj[number].detach().chunk(2)
        self.gate, self.up, self.down = (_linear(weight) for weight in (gate, up, stacked.down_proj[number].detach()))
        self.activation = stacked.act_fn

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        inputs = tokens * (weights != 0)
        output: Tensor = self.down(self.activation(self.gate(inputs)) * self.up(inputs) * weights)
        return output


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone())
    return linear


class OpenExperts(nn.ModuleList):
    """In place of what holds the stacked weights of a block's experts."""

    def __init__(self, stacked: Any) -> None:
        super().__init__([OpenExpert(stacked, number) for number in range(len(stacked.down_proj))])

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        every = tokens.new_zeros(len(tokens), len(self)).scatter_add(1, chosen, weights.to(tokens.dtype))
        return torch.stack([expert(tokens, every[:, n, None]) for n, expert in enumerate(self)]).sum(0)


def unstack_experts(family: Family, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a file, with the parts of those that hold all experts in their place."""
    unstacked = dict(tensors)
    for stack, (pattern,) in family.experts.stacks.items() if family.experts is not None else ():
        for name in [name for name in tensors if name.endswith(f".{stack}")]:
            before = name.removesuffix(stack)
            parts = enumerate(unstacked.pop(name))
            unstacked |= {f"{before}{pattern.format(expert=expert)}": part for expert, part in parts}
    return unstacked


def open_up(model: nn.Module, family: Family) -> None:
    """Put such experts into every block of a model."""
    if family.experts is None:
        return
    blocks: Any = model.get_submodule(family.layers)
    owner, _, name = family.experts.module.rpartition(".")
    for block in blocks:
        if not hasattr(block.get_submodule(owner), name):
            continue  # one of those before the blocks with experts
        setattr(block.get_submodule(owner), name, OpenExperts(block.get_submodule(family.experts.module)))


def paths_of(family: Family) -> dict[str, tuple[str, ...]]:
    """Linear module of a block, as it stands on disk → its paths in a block of a model with such experts."""
    paths = dict(module_paths(family))
    for module, (number, role) in family.expert_modules.items():
        assert family.experts is not None
        roles = ("gate", "up") if role == "gate" and family.experts.gate == family.experts.up else (role,)
        paths[module] = tuple(f"{family.experts.module}.{number}.{part}" for part in roles)
    return paths
