"""A pass back through the blocks of a model, one at a time: what the Fisher metric and Taylor importances share.

One pass forward keeps the states at the ends of all blocks. One pass backward takes every block again, with its
gradient. Both are linear in depth.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.model import Model
from ckpt_prune.common.progress import track
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.state_memory import Allocate


@dataclass(frozen=True)
class Passed:
    """Some samples that went back through a block, of one of the gradients at its end.

    Attributes:
        index: which of the gradients.
        samples: how many.
        inputs: of the linear modules that are watched, by their path in the block.
        outputs: theirs.
        gradients: at these outputs.
    """

    index: int
    samples: int
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def states_at_ends(model: Model, stream: HiddenStream, allocate: Allocate) -> list[Tensor]:
    """Hidden states that enter the first block and that leave every block.

    Args:
        model: the dense model.
        stream: at its first block; it stays there.
        allocate: makes the tensors that hold hidden states.

    Returns:
        One more than there are blocks, (N, T, hidden) each.
    """
    states = [stream.states]
    for block in track(range(model.blocks), "gradients: states", total=model.blocks):
        states.append(allocate(tuple(stream.states.shape), stream.states.dtype))
        module = stream.factory.build_block(block, model.read_block(block))
        stream.pass_through(module, block, states[-2], states[-1])
    return states


def pass_back(
    stream: HiddenStream,
    module: nn.Module,
    block: int,
    given: Tensor,
    gradients: Sequence[Tensor],
    paths: Iterable[str],
) -> Iterator[Passed]:
    """Turn gradients at the states that leave a block into those at the states that enter it.

    Args:
        stream: of the samples.
        module: the block; hooks are left on it.
        block: its index.
        given: states that enter it, (N, T, hidden).
        gradients: at the states that leave it, (N, T, hidden) float32 each; turned in place.
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
            entering = given[rows].to(stream.factory.device).requires_grad_(True)
            leaving = stream.run(module, block, entering)
        held = {path: output.detach() for path, output in outputs.items()}
        for index, gradient in enumerate(gradients):
            entered, *others = torch.autograd.grad(
                leaving,
                [entering, *outputs.values()],
                gradient[rows].to(leaving),
                retain_graph=index < len(gradients) - 1,
            )
            yield Passed(index, len(entering), inputs, held, dict(zip(outputs, others, strict=True)))
            # Last: the gradient at an output that is added to the stream is this very tensor.
            gradient[rows] = entered.float().cpu()
