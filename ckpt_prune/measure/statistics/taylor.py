"""LLM-Pruner's Taylor importances of units, by gradients of the loss (scoring/README.md, section 6).

Let L_s be the mean loss of the text of sample s, g_s = ∂L_s/∂w at a weight w and g = Σ_s g_s. Setting w to zero changes
the loss by g w − ½ h w², and h ≈ Σ_s g_s². The importance of a unit is a sum over all weights that go with it, of |g w|
or of |g w − ½ Σ_s (g_s w)²| (Ma et al. 2023, eq. 5, "element-wise", aggregated by a sum). These weights are its rows of
the linear modules that make its space, and its columns of the consumer.

The labels are the text's own; the Fisher metric draws them from the model (`statistics.fisher`). The gradients are
taken block by block (`streams.backward`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ckpt_prune.checkpoint.block_thread import read_ahead
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.measure.moments.inputs import Taylor
from ckpt_prune.measure.samples.samples import Samples, split_batches
from ckpt_prune.measure.streams.backward import pass_back, states_at_ends
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.readout import READOUT_TOKENS
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.family import linears_of
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.parallel.group import ALONE, Group


@dataclass
class _WeightGradient:
    """Gradients of the loss at one weight, (d_out, d_in) float32.

    Attributes:
        total: Σ_s g_s.
        squares: Σ_s g_s².
    """

    total: Tensor
    squares: Tensor

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add samples: inputs of the module (B, T, d_in), and gradients at its outputs (B, T, d_out)."""
        for x, y in zip(inputs.float(), outputs.float(), strict=True):
            gradient = y.T @ x
            self.total += gradient
            self.squares.addcmul_(gradient, gradient)


def measure_taylor(
    model: Model,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    group: Group = ALONE,
) -> Iterator[tuple[int, dict[str, Taylor]]]:
    """Measure importances of the units of every site of the dense model, block by block from the last to the first.

    A model of L blocks has 5 L of them run, gradients of states and of weights counted as one run each more. Memory: a
    block with its activations of `TOKENS_PER_BATCH` tokens and twice its weights in float32, everything outside
    the blocks, the hidden states at the end of every block and once more for the gradients, and the logits of
    `READOUT_TOKENS` tokens (at least of one sample) for some classes.

    The model is a causal language model, and the samples are windows of text. Processes of a group share the samples;
    the first one gets the importances.

    Yields:
        Index of a block, and its sites by `Model.moments_name`.
    """
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate, group=group)
    states = states_at_ends(model, stream, allocate)
    readout = stream.readout()
    leaving = states.pop()
    gradients = allocate(tuple(leaving.shape), torch.float32)
    for rows in split_batches(stream.samples, READOUT_TOKENS):
        gradients[rows] = readout.loss_gradients(stream.samples.batch(rows), leaving[rows]).cpu()
    del readout, leaving
    backward = read_ahead(model.read_block, range(model.blocks - 1, -1, -1))
    for block, tensors in track(backward, "gradients", total=model.blocks):
        module = stream.factory.build_block(block, tensors).requires_grad_(False)
        weights = _pass_block(stream, module, block, states.pop(), gradients)
        importances = {
            model.moments_name(block, space): _sum_importances(model, block, space, tensors, weights)
            for space in model.family.consumers
            if space in model.spaces(block)
        }
        for name, taylor in importances.items():
            if not all_finite(taylor.second):
                raise UserError(f"the gradient at {name} is not finite: the model overflows in {compute_dtype}")
        yield block, importances


def _pass_block(
    stream: HiddenStream, module: nn.Module, block: int, entering_states: Tensor, gradients: Tensor
) -> dict[str, _WeightGradient]:
    """Pass gradients back through a block, and return those at the weights of its linear modules, named as on disk."""
    factory, group = stream.factory, stream.group
    paths_of = {
        disk: [path.removesuffix(".weight") for path in factory.find_paths(block, factory.family.tensor(block, disk))]
        for disk in linears_of(factory.model.spaces(block))
    }
    paths = [path for of_weight in paths_of.values() for path in of_weight]
    weights: dict[str, _WeightGradient] = {}
    for batch in pass_back(stream, module, block, entering_states, [gradients], paths):
        for disk, own_paths in paths_of.items():
            # Some models flatten samples before a linear module.
            x = _by_sample(batch.inputs[own_paths[0]], batch.samples)
            y = torch.cat([_by_sample(batch.gradients[path], batch.samples) for path in own_paths], -1)
            if disk not in weights:
                zeros = (x.new_zeros(y.shape[-1], x.shape[-1], dtype=torch.float32) for _ in range(2))
                weights[disk] = _WeightGradient(*zeros)
            weights[disk].add(x, y)
    return {disk: _WeightGradient(group.add(sums.total), group.add(sums.squares)) for disk, sums in weights.items()}


def _by_sample(tokens: Tensor, samples: int) -> Tensor:
    return tokens.reshape(samples, -1, tokens.shape[-1])


def _sum_importances(
    model: Model, block: int, space: SpaceName, tensors: Mapping[str, Tensor], weights: Mapping[str, _WeightGradient]
) -> Taylor:
    """Sum importances over the weights of each unit, on CPU."""
    units = model.site_units(space, block)
    first, second = (torch.zeros(units, dtype=torch.float64) for _ in range(2))
    for axis, incidence in model.family.columns[space].incidences:
        gradient = weights[incidence.module]
        weight = tensors[model.tensor(block, incidence.module)].to(gradient.total)
        lines = incidence.lines(torch.arange(units), units, model.dimension)
        change = gradient.total * weight
        for sums in (first, second):
            if sums is second:
                change -= gradient.squares * weight.square() / 2
            by_line = change.abs().sum(int(axis == "rows"), dtype=torch.float64).cpu()
            sums += by_line[lines].view(incidence.copies, units, -1).sum((0, 2))
    return Taylor(first, second)
