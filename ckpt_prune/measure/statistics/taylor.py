"""LLM-Pruner's Taylor importances of units, by gradients of the loss (scoring/README.md, section 6).

Let L_s be the mean loss of the text of sample s, g_s = ∂L_s/∂w at a weight w and g = Σ_s g_s. Setting w to zero changes
the loss by g w − ½ h w², and h ≈ Σ_s g_s². The importance of a unit is the sum of |g w|, or of |g w − ½ Σ_s (g_s w)²|,
over all weights that go with it: its rows of the linear modules that make its space and its columns of the consumer
(Ma et al. 2023, eq. 5, "element-wise", aggregated by a sum).

The labels are the text's own, where the Fisher metric draws them from the model (`statistics.fisher`). The gradients
are taken block by block (`calibration.backward`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.measure.moments.inputs import Taylor
from ckpt_prune.measure.samples.samples import Samples, split_batches
from ckpt_prune.measure.streams.backward import pass_back, states_at_ends
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.readout import READOUT_TOKENS
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.parallel.group import ALONE, Group


@dataclass
class _Gradient:
    """Gradients of the loss at one weight, (d_out, d_in) float32.

    Attributes:
        total: Σ_s g_s.
        squares: Σ_s g_s².
    """

    total: Tensor
    squares: Tensor

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Some more samples.

        Args:
            inputs: of the linear module, (B, T, d_in).
            outputs: gradients at its outputs, (B, T, d_out).
        """
        for x, y in zip(inputs.float(), outputs.float(), strict=True):
            own = y.T @ x
            self.total += own
            self.squares.addcmul_(own, own)

    def pool(self, group: Group) -> None:
        """Add what other processes have seen, at the first one."""
        self.total, self.squares = group.add(self.total), group.add(self.squares)


def measure_taylor(
    model: Model,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    group: Group = ALONE,
) -> Iterator[tuple[int, dict[str, Taylor]]]:
    """Importances of the units of every site of the dense model, block by block from the last to the first.

    A model of L blocks has 5 L of them run, gradients of states and of weights counted as one run each more. Memory: a
    block with its activations of `streams.TOKENS_PER_BATCH` tokens and twice its weights in float32, everything outside
    the blocks, the hidden states at the end of every block and once more for the gradients, and the logits of
    `READOUT_TOKENS` tokens (at least of one sample) twice.

    Args:
        model: the dense model, a causal language model.
        samples: windows of text, all of which are run.
        device: where blocks run.
        compute_dtype: in which they run.
        allocate: makes the tensors that hold hidden states.
        group: processes that share the samples out among them; the first one gets the importances.

    Yields:
        Index of a block, and its sites by `Model.moments_name`.

    Raises:
        UserError: a gradient is not finite.
    """
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate, group=group)
    states = states_at_ends(model, stream, allocate)
    readout = stream.readout()
    leaving = states.pop()
    gradients = allocate(tuple(leaving.shape), torch.float32)
    for rows in split_batches(stream.samples, READOUT_TOKENS):
        gradients[rows] = readout.loss_gradients(stream.samples.batch(rows), leaving[rows]).cpu()
    del readout, leaving
    for block in track(range(model.blocks - 1, -1, -1), "gradients", total=model.blocks):
        tensors = model.read_block(block)
        module = stream.factory.build_block(block, tensors).requires_grad_(False)
        weights = _backward(stream, module, block, states.pop(), gradients)
        found = {
            model.moments_name(block, space): _importances(model, block, space, tensors, weights)
            for space in model.family.consumers
        }
        for name, own in found.items():
            if not all_finite(own.second):
                raise UserError(f"the gradient at {name} is not finite: the model overflows in {compute_dtype}")
        yield block, found


def _backward(
    stream: HiddenStream, module: nn.Module, block: int, given: Tensor, gradients: Tensor
) -> dict[str, _Gradient]:
    """Turn gradients at the states that leave a block into those at the states that enter it.

    Returns:
        Linear module as it stands on disk → gradients at its weight, (d_out, d_in).
    """
    factory = stream.factory
    parts = {
        disk: [path.removesuffix(".weight") for path in factory.find_paths(block, factory.family.tensor(block, disk))]
        for disk in dict.fromkeys(name for space in factory.family.consumers.values() for name in space.modules)
    }
    paths = [path for own in parts.values() for path in own]
    found: dict[str, _Gradient] = {}
    for passed in pass_back(stream, module, block, given, [gradients], paths):
        for disk, own in parts.items():
            # Some models flatten samples before a linear module.
            x = _by_sample(passed.inputs[own[0]], passed.samples)
            y = torch.cat([_by_sample(passed.gradients[path], passed.samples) for path in own], -1)
            if disk not in found:
                found[disk] = _Gradient(*(x.new_zeros(y.shape[-1], x.shape[-1], dtype=torch.float32) for _ in "12"))
            found[disk].add(x, y)
    for own_gradient in found.values():
        own_gradient.pool(stream.group)
    return found


def _by_sample(tokens: Tensor, samples: int) -> Tensor:
    return tokens.reshape(samples, -1, tokens.shape[-1])


def _importances(
    model: Model, block: int, space: SpaceName, tensors: Mapping[str, Tensor], weights: Mapping[str, _Gradient]
) -> Taylor:
    """Sums over the weights of each unit, on CPU."""
    description, units = model.family.columns[space], model.site_units(space)
    first, second = (torch.zeros(units, dtype=torch.float64) for _ in "12")
    for axis, incidence in description.incidences:
        own = weights[incidence.module]
        weight = tensors[model.tensor(block, incidence.module)].to(own.total)
        lines = incidence.lines(torch.arange(units), units, model.dimension)
        change = own.total * weight
        for sums in (first, second):
            if sums is second:
                change -= own.squares * weight.square() / 2
            by_line = change.abs().sum(int(axis == "rows"), dtype=torch.float64).cpu()
            sums += by_line[lines].view(incidence.copies, units, -1).sum((0, 2))
    return Taylor(first, second)
