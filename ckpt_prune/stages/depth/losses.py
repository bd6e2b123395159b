"""The loss of a causal language model without one block or another (SLEB)."""

from collections.abc import Collection

import torch

from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.depth import output_tensors
from ckpt_prune.model.model import Model

LOSS_TOKENS = 2048
"""Tokens that losses are compared on: every block is run for every other one."""


@torch.no_grad()
def measure_losses_without(
    model: Model,
    samples: Samples,
    gone: Collection[int],
    allowed: Collection[int],
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    part: str = "block",
) -> dict[int, float]:
    """Measure the mean negative log likelihood of a token without the blocks that are gone and one more that may go.

    One walk over the blocks: before one that may go, the states go on as a branch of their own, through all blocks
    that follow. Time: L²/2 runs of a block, and L readouts. Memory: a block, and hidden states of every branch.

    Args:
        allowed: blocks of which each is left out in turn.
        allocate: makes the tensors that hold hidden states.
        part: what is left out of a block: all of it, or its attention or mlp.
    """
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    factory = stream.factory
    branches: dict[int, torch.Tensor] = {}
    for block in track(range(model.blocks), "leaving blocks out", total=model.blocks):
        if block in gone and part == "block":
            continue
        tensors = model.read_block(block)
        outputs = () if part == "block" else output_tensors(model, block, part)
        without_part = tensors | {name: torch.zeros_like(tensors[name]) for name in outputs}
        module = factory.build_block(block, without_part if block in gone else tensors)
        branch = None
        if block in allowed:
            branch = allocate(tuple(stream.states.shape), stream.states.dtype)
            branch.copy_(stream.states)
            if part != "block":
                stream.pass_through(factory.build_block(block, without_part), block, branch, branch)
        for states in (*branches.values(), stream.states):
            stream.pass_through(module, block, states, states)
        if branch is not None:
            branches[block] = branch
    return {block: stream.measure_nll(states) for block, states in branches.items()}
