"""The Fisher metric at a site: how far errors there move the model's own output (measure/README.md, section 5).

Labels ŷ are drawn from the model's own predictions. Let ℓ = Σ_s log p(ŷ_s) / √S over the S predictions of a sample,
and g = ∂ℓ/∂y at an output y of the site. To second order an error δ of y moves the model's output by

    KL ≈ ½ E[Σ_t (g_t·δ_t)²] ≈ ½ tr(F E[δδᵀ]),    F = E[Σ_t g_t g_tᵀ].

Expectations are over samples, that of δ over tokens; g and δ are taken as independent. The gradients are taken block by
block (`streams.backward`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ckpt_prune.checkpoint.block_thread import read_ahead
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.measure.moments.gram import add_gram
from ckpt_prune.measure.moments.sums import Sums
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.distances import EndDistances
from ckpt_prune.measure.streams.backward import draw_end_gradients, pass_back, states_at_ends
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.observers import RotaryTurner
from ckpt_prune.measure.streams.readout import DrawnGradients
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.family import Modality
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName

LIMITS: dict[Modality, int] = {"text": 8, "pairs": 32, "image": 32, "audio": 8}
"""Samples that are enough: sites are compared on the same ones, so that few tell them apart. An image is one
prediction."""
LABEL_DRAWS = 4
"""Draws of labels for each prediction of a text, averaged in shallow models: widths would follow the luck of one."""


@dataclass(frozen=True)
class Fisher(Sums):
    """Sums of the Fisher metric at one site over samples.

    Attributes:
        samples: how many.
        sums: at a site with a consumer Σ g gᵀ over all tokens, (d_out, d_out) float32: half its trace with E[δδᵀ], over
            `samples`, is the divergence of a sample. At a site of q and k, or of rotary pairs, (heads,) float32: half
            its product with the squared errors of a head's logits q·k, summed over all pairs of tokens of a sample, is.
    """

    samples: int
    sums: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over samples, float64."""
        return self.sums.double() / self.samples


class Watcher(Protocol):
    """Looks on while the gradients of a block are taken."""

    def begin(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Begin a block, with its tensors by on-disk name."""
        ...

    def see(self, space: SpaceName, inputs: Tensor, gradient: Tensor, drawn: DrawnGradients, samples: int) -> None:
        """Take some samples at a site with a consumer, on the device that blocks run on.

        `inputs` of the consumer are (tokens, d_in), samples one after the other, and the gradient at its output is
        (tokens, d_out), of the draw `drawn`, whose values are not of this block.
        """
        ...

    def end(self, samples: int) -> None:
        """End the block, through which so many samples have gone."""
        ...


def measure_fisher(
    model: Model,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    watcher: Watcher | None = None,
    ends: EndDistances | None = None,
    rotary: bool = False,
    known: Callable[[int], Tensor] | None = None,
    draws: int = LABEL_DRAWS,
) -> Iterator[tuple[int, dict[str, Fisher]]]:
    """Measure the Fisher metric at every site of the dense model, block by block from the last to the first.

    A model of L blocks has 2 (1 + `draws`) L of them run, a gradient counted twice. Memory: a block with its
    activations of `TOKENS_PER_BATCH` tokens, everything outside the blocks, the hidden states at the end of every block
    and once more for each draw's gradients, and the logits of `READOUT_TOKENS` tokens (at least of one sample)
    for some classes.

    All samples are run; a few are enough. `watcher` looks on at every block, `ends` adds up distances between the ends
    of all of them. `rotary` adds the sites of rotary pairs. `known` gives the states that leave a block, if they are
    known: then none is run forward alone. Labels are drawn `draws` times, and each draw goes back through the blocks.

    Yields:
        Index of a block, and its sites by `Model.moments_name` (on-disk weight of the consumer, or of the query).
    """
    blocks = model.blocks
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    states = states_at_ends(model, stream, allocate, known)
    if ends is not None:
        ends.begin(stream, states)
    end = states.pop()
    gradients = draw_end_gradients(stream.readout(), samples, end, allocate, draws)
    if ends is not None:
        ends.see(stream, states, end, gradients)
    backward = read_ahead(model.read_block, range(blocks - 1, -1, -1))
    for block, tensors in track(backward, "gradients", total=blocks):
        block_watcher = watcher if block in model.spaced_blocks else None
        if block_watcher is not None:
            block_watcher.begin(block, tensors)
        module = stream.factory.build_block(block, tensors).requires_grad_(False)
        end = states.pop()
        sums = _pass_block(stream, module, block, end, gradients, block_watcher, rotary)
        if ends is not None and states:
            ends.see(stream, states, end, gradients)
        if block_watcher is not None:
            block_watcher.end(len(samples))
        named = {model.moments_name(block, space): Fisher(len(samples), total) for space, total in sums.items()}
        for name, metric in named.items():
            if not all_finite(metric.sums):
                raise UserError(f"the gradient at {name} is not finite: the model overflows in {compute_dtype}")
        yield block, named


def _pass_block(
    stream: HiddenStream,
    module: nn.Module,
    block: int,
    entering_states: Tensor,
    gradients: Sequence[DrawnGradients],
    watcher: Watcher | None,
    rotary: bool,
) -> dict[SpaceName, Tensor]:
    """Pass gradients back through a block, and return `Fisher.sums` of its sites, on CPU."""
    family, factory = stream.factory.family, stream.factory
    values = [drawn.values for drawn in gradients]
    spaces = factory.model.spaces(block)
    if not spaces:
        for _ in pass_back(stream, module, block, entering_states, values):
            pass
        return {}
    consumers = {name: space.consumer for name, space in family.consumers.items() if name in spaces}
    # A space within another ends in the same consumer.
    spaces_at = {
        consumer: [name for name, space in family.columns.items() if space.consumer == consumer and name in spaces]
        for consumer in consumers.values()
    }
    readers = {name: space.readers for name, space in family.logits.items() if name in spaces}
    # Keys meet queries turned by position; turning changes no length of a gradient.
    turners = {
        name: RotaryTurner(factory, module, block, space)
        for name, space in family.rotary_spaces.items()
        if rotary and name in spaces
    }
    readers |= {space: family.rotary_spaces[space].readers for space in turners}
    names = {*consumers.values(), *(reader for pair in readers.values() for reader in pair)}
    paths = {name: factory.module_path(block, name) for name in names}
    sums: dict[SpaceName, Tensor] = {}
    head_dim = factory.model.dimension("head_dim")
    for batch in pass_back(stream, module, block, entering_states, values, paths.values()):
        drawn = gradients[batch.index]
        for space, consumer in consumers.items():
            if space not in sums:
                width = factory.count_outputs(module, block, consumer)
                sums[space] = torch.zeros(width, width, device=factory.device)
            if paths[consumer] not in batch.gradients:
                continue
            g = batch.gradients[paths[consumer]].flatten(0, -2)
            add_gram(sums[space], g, drawn.weight)
            if watcher is not None:
                for at_consumer in spaces_at[consumer]:
                    inputs = batch.inputs[paths[consumer]].flatten(0, -2)
                    watcher.see(at_consumer, inputs, g.float(), drawn, batch.samples)
        for space, (query, key, *_) in readers.items():
            keys = batch.outputs[paths[key]]
            if space in turners:
                keys = turners[space](keys).flatten(-2).transpose(1, 2).flatten(-2)
            of_heads = _square_logit_gradients(batch.gradients[paths[query]], keys, head_dim) * drawn.weight
            sums[space] = sums[space] + of_heads if space in sums else of_heads
    return {space: sums[space].cpu() for space in spaces if space in sums}


def _square_logit_gradients(query: Tensor, keys: Tensor, head_dim: int) -> Tensor:
    """Return the mean squared gradient of a logit of every head, summed over samples, (heads,).

    The gradient of a token's query, `query` (B, T, heads head_dim), is Σ_s γ_s k_s, with γ_s the gradients of its
    logits, which add up to zero. Taken as independent of the keys (B, T, KV heads head_dim), they have
    Σ_s γ_s² = ‖∂ℓ/∂q‖² / E‖k − k̄‖². This is divided by the pairs of tokens.
    """
    g, k = (states.float().view(*states.shape[:2], -1, head_dim) for states in (query, keys))
    spread = (k - k.mean(1, keepdim=True)).square().sum(-1).mean(1)  # (B, KV heads)
    spread = spread.repeat_interleave(g.shape[2] // k.shape[2], 1)
    squares = g.square().sum((1, 3))  # (B, heads)
    pairs = g.shape[1] ** 2
    return torch.where(spread > 0, squares / spread / pairs, 0.0).sum(0)
