"""What errors at a site do to the model's own output: the Fisher metric there (measure/README.md, section 5).

Let ŷ be labels that are drawn from the model's own predictions, ℓ = Σ_s log p(ŷ_s) / √S over the S predictions of a
sample, and g = ∂ℓ/∂y at an output y of the site. To second order an error δ of y moves the model's output by

    KL ≈ ½ E[Σ_t (g_t·δ_t)²] ≈ ½ tr(F E[δδᵀ]),    F = E[Σ_t g_t g_tᵀ],

expectations over samples, of δ over tokens, with g and δ taken as independent. The gradients are taken block by block
(`calibration.backward`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.family import Modality
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.measure.moments.gram import add_gram
from ckpt_prune.measure.samples.samples import Samples, split_batches
from ckpt_prune.measure.streams.backward import pass_back, states_at_ends
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.observers import Turning
from ckpt_prune.measure.streams.readout import READOUT_TOKENS, DrawnGradients, Readout
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory

LIMITS: dict[Modality, int] = {"text": 8, "image": 32, "audio": 8}
"""Samples that are enough: sites are compared on the same ones, so that few tell them apart. An image is one
prediction."""
_SEED = 0
"""Of the labels that are drawn from the model's own predictions."""


@dataclass(frozen=True)
class Fisher:
    """Sums over samples of the Fisher metric at one site.

    Attributes:
        samples: how many.
        sums: of a site with a consumer Σ g gᵀ over all tokens, (d_out, d_out) float32: half its trace with E[δδᵀ], over
            `samples`, is the divergence of a sample. Of a site of q and k (heads,) float32: half its product with the
            squared errors of a head's logits q·k, summed over all pairs of tokens of a sample, is. A site of rotary
            pairs has the same.
    """

    samples: int
    sums: Tensor

    def __add__(self, other: "Fisher") -> "Fisher":
        """Sums over the samples of both."""
        return Fisher(self.samples + other.samples, self.sums + other.sums)

    @property
    def mean(self) -> Tensor:
        """Per sample, float64."""
        return self.sums.double() / self.samples


class EndWatcher(Protocol):
    """Looks on at the ends of blocks while gradients are taken."""

    def begin(self, stream: HiddenStream, states: Sequence[Tensor]) -> None:
        """States at all ends are known: those that enter the first block, and that leave every one."""
        ...

    def see(self, stream: HiddenStream, before: Sequence[Tensor], end: Tensor, drawn: Sequence[DrawnGradients]) -> None:
        """Gradients are at one of the ends, the last first.

        Args:
            stream: of the samples.
            before: states at the ends before it.
            end: states there.
            drawn: gradients there, of every draw.
        """
        ...


class Watcher(Protocol):
    """Looks on while the gradients of a block are taken."""

    def begin(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """A block comes next; `tensors` are its own, by on-disk name."""
        ...

    def see(self, space: SpaceName, inputs: Tensor, gradient: Tensor, drawn: DrawnGradients, samples: int) -> None:
        """Some samples at a site with a consumer, on the device where blocks run.

        Args:
            space: which of the block.
            inputs: of the consumer, (tokens, d_in), samples one after the other.
            gradient: at its output, (tokens, d_out).
            drawn: the draw that it is of; its values are not of this block.
            samples: how many.
        """
        ...

    def end(self, samples: int) -> None:
        """The block is through, with so many samples."""
        ...


def measure_fisher(
    model: Model,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    watcher: Watcher | None = None,
    ends: EndWatcher | None = None,
    rotary: bool = False,
) -> Iterator[tuple[int, dict[str, Fisher]]]:
    """The Fisher metric at every site of the dense model, block by block from the last to the first.

    A model of L blocks has 4 L of them run, the gradient counted twice. Memory: a block with its activations of
    `streams.TOKENS_PER_BATCH` tokens, everything outside the blocks, the hidden states at the end of
    every block and once more for the gradients, and the logits of `READOUT_TOKENS` tokens (at least of one sample)
    twice.

    Args:
        model: the dense model.
        samples: all are run; a few are enough.
        device: where blocks run.
        compute_dtype: in which they run.
        allocate: makes the tensors that hold hidden states.
        watcher: told of every block.
        ends: told of the ends of all blocks.
        rotary: also at the sites of rotary pairs.

    Yields:
        Index of a block, and its sites by `Model.moments_name` (on-disk weight of the consumer, or of the query).

    Raises:
        UserError: a gradient is not finite.
    """
    blocks = model.blocks
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    states = states_at_ends(model, stream, allocate)
    if ends is not None:
        ends.begin(stream, states)
    end = states.pop()
    gradients = draw_end_gradients(stream.readout(), samples, end, allocate)
    if ends is not None:
        ends.see(stream, states, end, gradients)
    for block in track(range(blocks - 1, -1, -1), "gradients", total=blocks):
        tensors = model.read_block(block)
        watched = watcher if block in model.spaced else None
        if watched is not None:
            watched.begin(block, tensors)
        module = stream.factory.build_block(block, tensors).requires_grad_(False)
        end = states.pop()
        found = _backward(stream, module, block, end, gradients, watched, rotary)
        if ends is not None and states:
            ends.see(stream, states, end, gradients)
        if watched is not None:
            watched.end(len(samples))
        named = {model.moments_name(block, space): Fisher(len(samples), sums) for space, sums in found.items()}
        for name, own in named.items():
            if not all_finite(own.sums):
                raise UserError(f"the gradient at {name} is not finite: the model overflows in {compute_dtype}")
        yield block, named


def draw_end_gradients(readout: Readout, samples: Samples, states: Tensor, allocate: Allocate) -> list[DrawnGradients]:
    """Gradients at the states that leave the last block."""
    generator = torch.Generator().manual_seed(_SEED)
    found: list[DrawnGradients] = []
    for rows in split_batches(samples, READOUT_TOKENS):
        for index, own in enumerate(readout.gradients(samples.batch(rows), states[rows], generator)):
            if index == len(found):
                found.append(DrawnGradients(allocate(tuple(states.shape), torch.float32), own.whole, own.weight))
            found[index].values[rows] = own.values.cpu()
    return found


def _backward(
    stream: HiddenStream,
    module: nn.Module,
    block: int,
    given: Tensor,
    gradients: Sequence[DrawnGradients],
    watcher: Watcher | None,
    rotary: bool,
) -> dict[SpaceName, Tensor]:
    """Turn gradients at the states that leave a block into those at the states that enter it.

    Returns:
        `Fisher.sums` of the block's sites, on CPU.
    """
    family, factory = stream.factory.family, stream.factory
    if block not in factory.model.spaced:
        for _ in pass_back(stream, module, block, given, [each.values for each in gradients], ()):
            pass
        return {}
    consumers = {space: own.consumer for space, own in family.consumers.items()}
    watched_at = {
        consumer: [space for space, own in family.columns.items() if own.consumer == consumer]
        for consumer in consumers.values()
    }
    readers = {space: own.readers for space, own in family.logits.items()}
    # Keys meet queries turned by position; turning changes no length of a gradient.
    turnings = {space: Turning.of(factory, module, block, own) for space, own in family.turned.items() if rotary}
    readers |= {space: family.turned[space].readers for space in turnings}
    names = {*consumers.values(), *(reader for pair in readers.values() for reader in pair)}
    paths = {name: factory.module_path(block, name) for name in names}
    found: dict[SpaceName, Tensor] = {}
    head_dim = factory.model.dimension("head_dim")
    for passed in pass_back(stream, module, block, given, [each.values for each in gradients], paths.values()):
        drawn = gradients[passed.index]
        for space, consumer in consumers.items():
            if space not in found:
                width = factory.outputs(module, block, consumer)
                found[space] = torch.zeros(width, width, device=factory.device)
            if paths[consumer] not in passed.gradients:
                continue
            g = passed.gradients[paths[consumer]].flatten(0, -2)
            add_gram(found[space], g, drawn.weight)
            if watcher is not None:
                # A space within another ends in the same consumer.
                for each in watched_at[consumer]:
                    watcher.see(each, passed.inputs[paths[consumer]].flatten(0, -2), g.float(), drawn, passed.samples)
        for space, (query, key, *_) in readers.items():
            keys = passed.outputs[paths[key]]
            if space in turnings:
                keys = turnings[space](keys).flatten(-2).transpose(1, 2).flatten(-2)
            sums = _of_logits(passed.gradients[paths[query]], keys, head_dim) * drawn.weight
            found[space] = found[space] + sums if space in found else sums
    return {space: found[space].cpu() for space in family.spaces if space in found}


def _of_logits(query: Tensor, keys: Tensor, head_dim: int) -> Tensor:
    """Mean squared gradient of a logit of every head, from gradients of the queries, summed over samples, (heads,).

    The gradient of a token's query is Σ_s γ_s k_s, with γ_s the gradients of its logits, which add up to zero. Taken as
    independent of the keys, they have Σ_s γ_s² = ‖∂ℓ/∂q‖² / E‖k − k̄‖². This is divided by the pairs of tokens.

    Args:
        query: ∂ℓ/∂q, (B, T, heads head_dim).
        keys: (B, T, KV heads head_dim).
        head_dim: width of a head.
    """
    g, k = (each.float().view(*each.shape[:2], -1, head_dim) for each in (query, keys))
    spread = (k - k.mean(1, keepdim=True)).square().sum(-1).mean(1)  # (B, KV heads)
    spread = spread.repeat_interleave(g.shape[2] // k.shape[2], 1)
    squares = g.square().sum((1, 3))  # (B, heads)
    pairs = g.shape[1] ** 2
    return torch.where(spread > 0, squares / spread / pairs, 0.0).sum(0)
