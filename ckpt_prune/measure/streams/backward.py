"""Pass gradients back through the blocks of a model, one at a time, for the Fisher metric and Taylor importances.

One pass forward keeps the states at the ends of all blocks. One pass backward takes every block again, with its
gradient. Both are linear in depth.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ckpt_prune.checkpoint.block_thread import read_ahead
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import Samples, scored_tokens, split_batches
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.readout import READOUT_TOKENS, DrawnGradients, Readout
from ckpt_prune.measure.streams.state_memory import Allocate
from ckpt_prune.model.model import Model

_SEED = 0
"""Seed of the labels, which are drawn from the model's own predictions."""


@dataclass(frozen=True)
class BackwardBatch:
    """Some samples that went back through a block, with one of the gradients at its end.

    Attributes:
        index: which of the gradients.
        samples: how many.
        inputs: of the linear modules that are watched, by their path in the block.
        outputs: of these modules.
        gradients: at these outputs.
    """

    index: int
    samples: int
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def states_at_ends(
    model: Model, stream: HiddenStream, allocate: Allocate, known: Callable[[int], Tensor] | None = None
) -> list[Tensor]:
    """Return hidden states that enter the first block and that leave every block, (N, T, hidden) each.

    The stream is at the first block, and stays there. `known` gives those that leave a block, if they are known: blocks
    that read keys and values of others run all the same.
    """
    states, shape, dtype = [stream.states], tuple(stream.states.shape), stream.states.dtype
    if known is not None and not model.family.shares_keys:
        return states + [allocate(shape, dtype).copy_(known(block)) for block in range(model.blocks)]
    blocks = read_ahead(model.read_block, range(model.blocks))
    for block, tensors in track(blocks, "gradients: states", total=model.blocks):
        states.append(allocate(shape, dtype))
        module = stream.factory.build_block(block, tensors)
        stream.pass_through(module, block, states[-2], states[-1])
    return states


def draw_end_gradients(
    readout: Readout, samples: Samples, states: Tensor, allocate: Allocate, draws: int = 1
) -> list[DrawnGradients]:
    """Draw labels from the model's predictions, and return the gradients at the states that leave the last block.

    Labels are drawn `draws` times, and every draw has the same weight. A sample with one prediction has `DRAWS` anyway.
    """
    generator = torch.Generator().manual_seed(_SEED)
    gradients: list[DrawnGradients] = []
    for draw in range(draws):
        own: list[DrawnGradients] = []
        for rows in split_batches(samples, READOUT_TOKENS):
            scored = scored_tokens(samples, rows)
            for index, drawn in enumerate(readout.gradients(samples.batch(rows), states[rows], generator, scored)):
                if index == len(own):
                    values = allocate(tuple(states.shape), torch.float32)
                    # There is no second draw where the first output has one prediction.
                    share = 1 if (own[0] if own else drawn).whole else draws
                    own.append(replace(drawn, values=values, weight=drawn.weight / share, draw=draw + drawn.draw))
                own[index].values[rows] = drawn.values.cpu()
        gradients += own
        if own[0].whole:
            break
    return gradients


def pass_back(
    stream: HiddenStream,
    module: nn.Module,
    block: int,
    entering_states: Tensor,
    gradients: Sequence[Tensor],
    paths: Iterable[str] = (),
) -> Iterator[BackwardBatch]:
    """Turn gradients at the states that leave a block into those at the states that enter it, in place.

    Args:
        stream: of the samples.
        module: the block; hooks are left on it.
        block: number of the block.
        entering_states: (N, T, hidden).
        gradients: at the states that leave the block, (N, T, hidden) float32 each.
        paths: of linear modules in the block that are watched.

    Yields:
        Every batch with each of the gradients, before these are turned. Modules that saw nothing of it are left out.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def watch(path: str) -> None:
        def see(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[path], outputs[path] = args[0].detach(), output

        module.get_submodule(path).register_forward_hook(see)

    for path in dict.fromkeys(paths):
        watch(path)
    for _, rows in stream.batches:
        inputs.clear()
        outputs.clear()  # not every expert sees something of every batch
        with torch.enable_grad():
            entering = entering_states[rows].to(stream.factory.device).requires_grad_(True)
            leaving = stream.run(module, block, entering, rows)
        detached = {path: output.detach() for path, output in outputs.items()}
        for index, gradient in enumerate(gradients):
            entered, *others = torch.autograd.grad(
                leaving,
                [entering, *outputs.values()],
                gradient[rows].to(leaving),
                retain_graph=index < len(gradients) - 1,
            )
            at_outputs = dict(zip(outputs, others, strict=True))
            yield BackwardBatch(index, len(entering), inputs, detached, at_outputs)
            # Last: the gradient at an output that is added to the stream is this very tensor.
            gradient[rows] = entered.float().cpu()
