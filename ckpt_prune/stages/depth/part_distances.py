"""How far the attention or the mlp of every block moves the residual stream, and the model's own output.

See measure/README.md, section 6.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.distances import Distances
from ckpt_prune.measure.statistics.fisher import draw_end_gradients
from ckpt_prune.measure.streams.backward import pass_back, states_at_ends
from ckpt_prune.measure.streams.drift import Residual
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory


@dataclass(frozen=True)
class PartDistances:
    """What the part of every block does.

    Attributes:
        cosine: mean over tokens of 1 − cos of the stream without what the part gives and with it.
        divergence: ½ E[Σ_t (g_t·y_t)²], y being what the part's last projection gives and g the gradients there; None
            where it was not asked for.
    """

    cosine: list[float]
    divergence: list[float] | None = None

    @property
    def distances(self) -> Distances:
        """The same as of runs of one."""

        def matrix(values: list[float]) -> list[list[float]]:
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
    """Run the dense model over samples, and back where gradients are asked for.

    Args:
        model: the dense model, whose blocks have one such projection each.
        samples: all are run.
        part: attention or mlp.
        device: where blocks run.
        compute_dtype: in which they run.
        gradients: whether to predict divergences.
        allocate: makes the tensors that hold hidden states.
    """
    (space,) = model.family.part_spaces(part)
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    if gradients:
        states = states_at_ends(model, stream, allocate)
        return _back(model, stream, states, samples, space, allocate)
    found = []
    for block in track(range(model.blocks), "measuring", total=model.blocks):
        tensors = model.read_block(block)
        found.append(_cosine(stream, block, tensors, space, stream.states))
        stream.advance(block, tensors)
    return PartDistances(found)


def _back(
    model: Model,
    stream: HiddenStream,
    states: list[Tensor],
    samples: Samples,
    space: SpaceName,
    allocate: Allocate,
) -> PartDistances:
    factory, consumer = stream.factory, model.family.consumers[space].consumer
    drawn = draw_end_gradients(stream.readout(), samples, states.pop(), allocate)
    cosine, divergence = [0.0] * model.blocks, [0.0] * model.blocks
    for block in track(range(model.blocks - 1, -1, -1), "gradients", total=model.blocks):
        tensors, entering = model.read_block(block), states.pop()
        cosine[block] = _cosine(stream, block, tensors, space, entering)
        path = factory.module_path(block, consumer)
        module = factory.build_block(block, tensors).requires_grad_(False)
        for passed in pass_back(stream, module, block, entering, [each.values for each in drawn], [path]):
            own = drawn[passed.index]
            moved = (passed.gradients[path].float() * passed.outputs[path].float()).sum(-1).double()
            # Over all tokens of a sample where it has one prediction, else token by token.
            moved = moved.view(passed.samples, -1).sum(1) if own.whole else moved
            divergence[block] += own.weight * float(moved.square().sum()) / 2 / len(samples)
    return PartDistances(cosine, divergence)


@torch.no_grad()
def _cosine(stream: HiddenStream, block: int, tensors: dict[str, Tensor], space: SpaceName, entering: Tensor) -> float:
    """Mean of 1 − cos of the stream without a part and with it, before any norm of their sum."""
    residual, apart, tokens = Residual(stream, block, tensors, [space]), 0.0, 0
    residual.whole = True
    for _, rows in stream.batches:
        residual.run(rows, entering[rows])
        after = residual.after(space)
        before = after - residual.added(space)
        apart += float((1 - functional.cosine_similarity(before, after, dim=-1)).sum())
        tokens += len(after)
    return max(0.0, apart / tokens)
