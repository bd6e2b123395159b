"""Mamba 2 as llama.cpp has it: the rows of its input projection, and the axes of its vectors.

Heads of a group share inputs and outputs of their states, and are normalised together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckpt_prune.gguf.gguf_weight import GgufWeight


class StateSpace(NamedTuple):
    """Sizes of the Mamba 2 of all blocks: heads, columns of all heads together, groups of heads, and states of each."""

    heads: int
    columns: int
    groups: int
    states: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """Rows of the input projection: of gates, of what is convolved (inputs, B and C), and of time steps."""
        of_states = self.groups * self.states
        return (self.columns, self.columns, of_states, of_states, self.heads)


def reason_against(config: Any) -> str | None:
    """Return why llama.cpp does not compute the Mamba 2 of a config; None if it does."""
    least, most = getattr(config, "time_step_limit", None) or (0.0, float("inf"))
    if (least, most) != (0.0, float("inf")):
        return f"it does not limit time steps, and config.json has time_step_limit {[least, most]}"
    if getattr(config, "mamba_rms_norm", True) and getattr(config, "mamba_norm_before_gate", False):
        return "its norm comes behind the gate, and config.json has mamba_norm_before_gate"
    return None


def shape_tensors(
    block: Mapping[str, GgufWeight], modules: Mapping[str, str], sizes: StateSpace, factors: Sequence[float] = ()
) -> dict[str, GgufWeight]:
    """Return the tensors of a block with the axes that llama.cpp has: (heads, 1) and (groups, columns of a group).

    Args:
        block: name → tensor.
        modules: module, or name of a tensor that is no weight of one → tensor in GGUF.
        sizes: of all blocks.
        factors: of the parts of what the input projection makes, multiplied into its rows; none: 1.
    """
    of_groups = (sizes.groups, sizes.columns // sizes.groups)
    axes = {"ssm_a": (sizes.heads, 1), "ssm_d": (sizes.heads, 1), "ssm_norm": of_groups}
    rows = [torch.full((count, 1), by) for count, by in zip(sizes.inputs, factors, strict=bool(factors))]
    shaped = dict(block)
    for name, weight in block.items():
        tensor = modules.get(name) or modules.get(name.removesuffix(".weight"), "")
        if tensor in axes:
            shaped[name] = _reshape(weight, axes[tensor])
        elif tensor == "ssm_in" and factors:
            shaped[name] = weight.apply(lambda each: each * torch.cat(rows))
    return shaped


def _reshape(weight: GgufWeight, axes: tuple[int, int]) -> GgufWeight:
    return weight.apply(lambda tensor: tensor.reshape(axes), axes)
