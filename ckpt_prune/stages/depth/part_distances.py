"""How far the attention or the mlp of every block moves the residual stream, and the model's own output.

See measure/README.md, section 6.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.distances import Distances, Matrix
from ckpt_prune.measure.streams.backward import draw_end_gradients, pass_back, states_at_ends
from ckpt_prune.measure.streams.drift import Residual
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName


@dataclass(frozen=True)
class PartDistances:
    """How far the part of every block moves stream and output.

    Attributes:
        cosine: mean over tokens of 1 − cos of the stream without the part's output and with it.
        divergence: ½ E[Σ_t (g_t·y_t)²], y being the output of the part's last projection and g the gradients there;
            None if it was not asked for.
    """

    cosine: list[float]
    divergence: list[float] | None = None

    @property
    def distances(self) -> Distances:
        """The distances of runs of one block."""

        def matrix(values: list[float]) -> Matrix:
            size = len(values) + 1
            return [[values[a] if b == a + 1 else 0.0 for b in range(size)] for a in range(size)]

        return Distances(matrix(self.cosine), None if self.divergence is None else matrix(self.divergence))


def measure_part_distances(
    model: Model,
    samples: Samples,
    part: str,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    gradients: bool,
    allocate: Allocate = allocate_in_memory,
) -> PartDistances:
    """Run the dense model over samples, and back if gradients are asked for, which predict divergences.

    The part is attention or mlp. It has one last projection in each block of the model.
    """
    (space,) = model.family.part_spaces(part)
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    if gradients:
        return _pass_back(model, stream, samples, space, allocate)
    cosine = []
    for block in track(range(model.blocks), "measuring", total=model.blocks):
        tensors = model.read_block(block)
        cosine.append(_measure_cosine(stream, block, tensors, space, stream.states))
        stream.advance(block, tensors)
    return PartDistances(cosine)


def _pass_back(
    model: Model, stream: HiddenStream, samples: Samples, space: SpaceName, allocate: Allocate
) -> PartDistances:
    states = states_at_ends(model, stream, allocate)
    factory, consumer = stream.factory, model.family.consumers[space].consumer
    drawn = draw_end_gradients(stream.readout(), samples, states.pop(), allocate)
    cosine, divergence = [0.0] * model.blocks, [0.0] * model.blocks
    for block in track(range(model.blocks - 1, -1, -1), "gradients", total=model.blocks):
        tensors, entering = model.read_block(block), states.pop()
        cosine[block] = _measure_cosine(stream, block, tensors, space, entering)
        path = factory.module_path(block, consumer)
        module = factory.build_block(block, tensors).requires_grad_(False)
        for batch in pass_back(stream, module, block, entering, [draw.values for draw in drawn], [path]):
            draw = drawn[batch.index]
            shift = (batch.gradients[path].float() * batch.outputs[path].float()).sum(-1).double()
            # Over all tokens of a sample if it has one prediction, else token by token.
            shift = shift.view(batch.samples, -1).sum(1) if draw.whole else shift
            divergence[block] += draw.weight * float(shift.square().sum()) / 2 / len(samples)
    return PartDistances(cosine, divergence)


@torch.no_grad()
def _measure_cosine(
    stream: HiddenStream, block: int, tensors: dict[str, Tensor], space: SpaceName, entering: Tensor
) -> float:
    """Return the mean of 1 − cos of the stream without a part and with it, before any norm of their sum."""
    residual, distance, tokens = Residual(stream, block, tensors, [space]), 0.0, 0
    residual.whole = True
    for _, rows in stream.batches:
        residual.run(rows, entering[rows])
        after = residual.after(space)
        before = after - residual.addition(space)
        distance += float((1 - functional.cosine_similarity(before, after, dim=-1)).sum())
        tokens += len(after)
    return max(0.0, distance / tokens)
