"""Fit scales of what linear modules read and write, so that a pruned model predicts what the dense one does.

See stages/recovery/README.md, section 5. IA³ (Liu et al. 2022) trains such vectors beside frozen weights, on labels;
here they are fitted to the dense model's predictions and multiplied into the weights.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.readout import READOUT_TOKENS, Readout
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages.recovery.block_training import trainable_tensors
from ckpt_prune.stages.recovery.training import Objective, Progress, SampleSplit, Trained, cut, part_size, train

RATE, RATE_OF_LOSS = 3e-3, 7.5e-3
"""Adam's rate for factors near one, whatever the model's size: at most the first number, and the second times the root
of the divergence. The loss grows with the square of a factor's error, and Adam's steps are as long as its rate however
small gradients are."""
_BETAS, _CLIMB = (0.9, 0.99), 4
"""Adam's betas, and the part of all steps, one in so many, over which its rate climbs: there are tens of steps."""
NOTHING = 1e-6
"""Divergence, in nats, up to which there is nothing to fit: float32 holds a log-probability of -10 to 1e-6."""

ReadBlock = Callable[[int], Mapping[str, Tensor]]
"""Reads a block's tensors, by on-disk name."""


@dataclass(frozen=True)
class ModelInBlocks:
    """A model whose blocks are run one at a time.

    Attributes:
        stream: at its first block; its own states stay there.
        read: reads a block's tensors.
    """

    stream: HiddenStream
    read: ReadBlock
    blocks: int


Scales = dict[str, Tensor]
"""On-disk name of a weight (d_out, d_in) → factors of its outputs and of its inputs, (d_out + d_in,) float32."""


def apply_scales(tensors: Mapping[str, Tensor], scales: Scales) -> dict[str, Tensor]:
    """Return diag(o) W diag(i) of every weight (d_out, d_in) that has scales, in its dtype; others as they are."""
    new = dict(tensors)
    for name in new.keys() & scales.keys():
        outputs, inputs = torch.split(scales[name].detach().to(new[name].device), list(new[name].shape))
        new[name] = (new[name].float() * outputs[:, None] * inputs).to(new[name].dtype)
    return new


def fit_scales(
    pruned: ModelInBlocks,
    dense: ModelInBlocks,
    samples: Samples,
    split: SampleSplit,
    settings: RecoverySettings,
    *,
    seed: int,
    progress: Progress = lambda _epoch, _divergence: None,
) -> Trained[Scales]:
    """Minimise the divergence of the pruned model's predictions from the dense one's over scales, by Adam.

    Return the scales of weights, by on-disk name, and mean divergences from the dense model.

    Every step takes a batch forward through all blocks and back, one block in memory at a time. The gradient of a scale
    is a sum of that of the weight. Time: of an epoch about five runs of all blocks, and four of the head. Memory: a
    block, its gradients, both models' heads, the states of one batch at the ends of all blocks, and of all samples at
    the dense model's last.

    Args:
        dense: the model that it was made from. Its stream ends behind its last block.
        split: samples to fit on and samples to choose the epoch by.
        settings: epochs, batch, accumulate, schedule, patience, `lr`, `only` and `layers`.
    """
    for block in range(dense.blocks):
        dense.stream.advance(block, dense.read(block))
    objective = ScaleObjective(pruned, samples, dense.stream.states, dense.stream.readout(), settings)
    if not objective.scales:
        raise UserError("the model has no linear module that could be scaled")
    before = objective.loss(split.measured)
    rate = default_rate(before) if settings.lr is None else settings.lr
    optimizer = torch.optim.Adam(objective.parameters, lr=rate, betas=_BETAS)
    return train(objective, optimizer, split, settings, seed=seed, before=before, progress=progress)


def default_rate(divergence: float) -> float:
    """Return the highest learning rate, if none is asked for, from the divergence before."""
    return min(RATE, RATE_OF_LOSS * math.sqrt(max(divergence, 0.0))) if math.isfinite(divergence) else RATE


class ScaleObjective(Objective[Scales]):
    """Mean divergence of a pruned model from a dense one, over the scales of the pruned one's linear modules.

    Args:
        targets: states behind the dense model's last block, (N, T, hidden).
        expected: makes the dense model's outputs of them.
        settings: `only`, `layers`, and what goes through a block at once.

    Attributes:
        scales: they begin at one.
    """

    nothing = NOTHING

    def __init__(
        self,
        pruned: ModelInBlocks,
        samples: Samples,
        targets: Tensor,
        expected: Readout,
        settings: RecoverySettings,
    ) -> None:
        self._pruned, self._samples, self._targets, self._expected = pruned, samples, targets, expected
        self._readout, self._part = pruned.stream.readout(), part_size(settings)
        family, device = pruned.stream.factory.family, pruned.stream.factory.device
        self.scales: Scales = {}
        for block in settings.blocks(pruned.blocks):
            tensors = pruned.read(block)
            for name in trainable_tensors(family, block, tensors, settings.only):
                if tensors[name].dim() == 2 and tensors[name].numel():
                    self.scales[name] = torch.ones(sum(tensors[name].shape), device=device, requires_grad=True)
        self.parameters = [*self.scales.values()]

    def climb(self, steps: int) -> float:
        return min(_CLIMB, steps // 4)

    @torch.no_grad()
    def loss(self, rows: Tensor) -> float:
        total = 0.0
        for part in cut(rows, self._part):
            (*_, end) = self._forward(part)
            total += sum(self._readout.divergence(*outputs) for outputs in self._outputs(part, end))
        return total / len(rows)

    def add_gradients(self, rows: Tensor) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for part in cut(rows, self._part):
            states = list(self._forward(part))
            gradient = self._at_the_end(part, states.pop(), len(rows))
            for block in range(self._pruned.blocks - 1, -1, -1):
                gradient = self._back(block, part, states.pop(), gradient)

    def keep(self) -> Scales:
        return {name: factors.detach().clone() for name, factors in self.scales.items()}

    def _forward(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield the states that enter the first block and that leave every block, (B, T, hidden) each, on CPU."""
        stream = self._pruned.stream
        states = stream.states[rows]
        yield states
        with torch.no_grad():
            for block in range(self._pruned.blocks):
                module = stream.factory.build_block(block, apply_scales(self._pruned.read(block), self.scales))
                states = stream.run(module, block, states, rows).cpu()
                yield states

    def _outputs(self, rows: Tensor, end: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        for batch, states, targets in self._batches(rows, end):
            yield self._expected.outputs(batch, targets), self._readout.outputs(batch, states)

    def _batches(self, rows: Tensor, end: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
        for part in cut(torch.arange(len(rows)), max(1, READOUT_TOKENS // self._samples.tokens)):
            numbers = rows[part]
            single = [self._samples.batch(slice(number, number + 1)) for number in numbers.tolist()]
            batch = {name: torch.cat([sample[name] for sample in single]) for name in single[0]}
            yield batch, end[part], self._targets[numbers]

    def _at_the_end(self, rows: Tensor, end: Tensor, count: int) -> Tensor:
        """Return the gradient at states behind the last block, (B, T, hidden) float32.

        It is that of the mean over `count` samples.
        """
        gradients = [
            self._readout.divergence_gradients(batch, states, self._expected.outputs(batch, targets))
            for batch, states, targets in self._batches(rows, end)
        ]
        return torch.cat(gradients).div_(count)

    def _back(self, block: int, rows: Tensor, given: Tensor, gradient: Tensor) -> Tensor:
        """Add to the gradients of a block's scales, and return the gradient at what enters it."""
        stream, factory = self._pruned.stream, self._pruned.stream.factory
        tensors = self._pruned.read(block)
        module = factory.build_block(block, apply_scales(tensors, self.scales)).requires_grad_(False)
        scaled_names = [name for name in tensors if name in self.scales]
        weights = {
            name: [module.get_parameter(path) for path in factory.find_paths(block, name)] for name in scaled_names
        }
        flat = [part.requires_grad_() for parts in weights.values() for part in parts]
        with torch.enable_grad():
            entering = given.to(factory.device).requires_grad_(True)
            leaving = stream.run(module, block, entering, rows)
        entered, *slopes = torch.autograd.grad(
            leaving, [entering, *flat], gradient.to(leaving), allow_unused=True, materialize_grads=True
        )
        for name, parts in weights.items():
            slope = torch.cat([slopes.pop(0) for _ in parts]).float() * tensors[name].to(factory.device).float()
            factors, shape = self.scales[name], list(slope.shape)
            assert factors.grad is not None
            outputs, inputs = torch.split(factors.detach(), shape)
            of_outputs, of_inputs = torch.split(factors.grad, shape)
            of_outputs += slope @ inputs
            of_inputs += outputs @ slope
        return entered.float().cpu()
