"""Fit scales of what linear modules read and write, so that a pruned model predicts what the dense one does.

See stages/recovery/README.md, section 5. IA³ (Liu et al. 2022) trains such vectors beside frozen weights, on labels;
here they are fitted to the dense model's predictions and multiplied into the weights.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.readout import READOUT_TOKENS, Readout
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages.recovery.block_training import SampleSplit, cut, part_size, trainable_tensors
from ckpt_prune.stages.recovery.records import Trained

RATE, RATE_OF_LOSS = 3e-3, 7.5e-3
"""Of Adam, for factors that are near one, whatever the size of the model: at most the first, and the second times the
root of the divergence. What is lost is a square of how far factors are off, and Adam's steps are as long as its rate
however small gradients are."""
_BETAS = (0.9, 0.99)
NOTHING = 1e-6
"""Divergence, in nats, up to which there is nothing to fit: float32 holds a log-probability of -10 to 1e-6."""
"""There are tens of steps, not thousands."""

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


Scales = tuple[Tensor, Tensor]
"""Factors of a weight's outputs (d_out,) and inputs (d_in,), float32."""


def apply_scales(tensors: Mapping[str, Tensor], scales: Mapping[str, Scales]) -> dict[str, Tensor]:
    """Return diag(o) W diag(i) of every weight (d_out, d_in) that has scales, in its dtype; others as they are."""
    new = dict(tensors)
    for name in new.keys() & scales.keys():
        outputs, inputs = (scale.detach().to(new[name].device) for scale in scales[name])
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
    progress: Callable[[int, float], None] = lambda _epoch, _loss: None,
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
        progress: after every epoch its number and the divergence on held-out samples.
    """
    start = time.monotonic()
    for block in range(dense.blocks):
        dense.stream.advance(block, dense.read(block))
    task = _ScaleFit(pruned, samples, dense.stream.states, dense.stream.readout(), pruned.stream.readout(), settings)
    task.begin()
    trained = task.parameters
    if not trained:
        raise UserError("the model has no linear module that could be scaled")
    before = best = task.divergence(split.measured)
    epochs = 0 if before <= NOTHING else settings.epochs
    rate = default_rate(before) if settings.lr is None else settings.lr
    optimiser = torch.optim.Adam(trained, lr=rate, betas=_BETAS)
    steps = epochs * math.ceil(len(split.train) / settings.batch)
    order = torch.Generator().manual_seed(seed)
    kept, step, epoch, waited = dict[str, Scales](), 0, 0, 0
    for epoch in range(1, epochs + 1):
        for rows in cut(split.train[torch.randperm(len(split.train), generator=order)], settings.batch):
            optimiser.param_groups[0]["lr"] = rate * _share(step, steps, settings.schedule)
            task.gradients(rows)
            optimiser.step()
            step += 1
        divergence = task.divergence(split.measured)
        progress(epoch, divergence)
        # Where nothing is held out, nothing is chosen: the last epoch's, unless it is worse than none.
        better = divergence < (best if settings.held_out else before)
        waited = 0 if better else waited + 1
        if better:
            best, kept = (
                divergence,
                {name: (o.detach().clone(), i.detach().clone()) for name, (o, i) in task.scales.items()},
            )
        if waited >= settings.patience or not math.isfinite(divergence):
            break
    count = sum(parameter.numel() for parameter in trained)
    return Trained(kept, before, best, step, epoch, time.monotonic() - start, count, rate)


def default_rate(divergence: float) -> float:
    """Return the highest learning rate, if none is asked for, from the divergence before."""
    return min(RATE, RATE_OF_LOSS * math.sqrt(max(divergence, 0.0))) if math.isfinite(divergence) else RATE


def _share(step: int, steps: int, schedule: str) -> float:
    """Return the learning rate as a share of the highest: up over a few steps, then down in a cosine, or constant."""
    climb = min(1.0, (step + 1) / max(1, min(4, steps // 4)))
    return climb if schedule == "constant" else climb * (1 + math.cos(math.pi * step / steps)) / 2


@dataclass
class _ScaleFit:
    """One pruned model whose scales are fitted.

    Attributes:
        targets: states behind the dense model's last block, (N, T, hidden).
        scales: of every weight: of its outputs and of its inputs.
    """

    pruned: ModelInBlocks
    samples: Samples
    targets: Tensor
    expected: Readout
    readout: Readout
    settings: RecoverySettings

    def begin(self) -> None:
        """Set scales to one, for every linear module that is fitted."""
        family, device = self.pruned.stream.factory.family, self.pruned.stream.factory.device
        self.scales: dict[str, Scales] = {}
        for block in self.settings.blocks(self.pruned.blocks):
            tensors = self.pruned.read(block)
            for name in trainable_tensors(family, block, tensors, self.settings.only):
                if tensors[name].dim() == 2 and tensors[name].numel():
                    sides = (torch.ones(n, device=device, requires_grad=True) for n in tensors[name].shape)
                    self.scales[name] = (next(sides), next(sides))

    @property
    def parameters(self) -> list[Tensor]:
        return [side for pair in self.scales.values() for side in pair]

    @torch.no_grad()
    def divergence(self, rows: Tensor) -> float:
        """Return the mean divergence over samples."""
        total = 0.0
        for part in cut(rows, part_size(self.settings)):
            (*_, end) = self._forward(part)
            total += sum(self.readout.divergence(*outputs) for outputs in self._outputs(part, end))
        return total / len(rows)

    def gradients(self, rows: Tensor) -> None:
        """Set the gradient of every scale to that of the mean divergence over samples."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for part in cut(rows, part_size(self.settings)):
            states = list(self._forward(part))
            gradient = self._at_the_end(part, states.pop(), len(rows))
            for block in range(self.pruned.blocks - 1, -1, -1):
                gradient = self._back(block, states.pop(), gradient)

    def _forward(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield the states that enter the first block and that leave every block, (B, T, hidden) each, on CPU."""
        stream = self.pruned.stream
        states = stream.states[rows]
        yield states
        with torch.no_grad():
            for block in range(self.pruned.blocks):
                module = stream.factory.build_block(block, apply_scales(self.pruned.read(block), self.scales))
                states = stream.run(module, block, states).cpu()
                yield states

    def _outputs(self, rows: Tensor, end: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        for batch, states, targets in self._batches(rows, end):
            yield self.expected.outputs(batch, targets), self.readout.outputs(batch, states)

    def _batches(self, rows: Tensor, end: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
        for part in cut(torch.arange(len(rows)), max(1, READOUT_TOKENS // self.samples.tokens)):
            numbers = rows[part]
            single = [self.samples.batch(slice(number, number + 1)) for number in numbers.tolist()]
            batch = {name: torch.cat([sample[name] for sample in single]) for name in single[0]}
            yield batch, end[part], self.targets[numbers]

    def _at_the_end(self, rows: Tensor, end: Tensor, count: int) -> Tensor:
        """Return the gradient at states behind the last block, (B, T, hidden) float32.

        It is that of the mean over `count` samples.
        """
        gradients = [
            self.readout.divergence_gradients(batch, states, self.expected.outputs(batch, targets))
            for batch, states, targets in self._batches(rows, end)
        ]
        return torch.cat(gradients).div_(count)

    def _back(self, block: int, given: Tensor, gradient: Tensor) -> Tensor:
        """Add to the gradients of a block's scales, and return the gradient at what enters it."""
        stream, factory = self.pruned.stream, self.pruned.stream.factory
        tensors = self.pruned.read(block)
        module = factory.build_block(block, apply_scales(tensors, self.scales)).requires_grad_(False)
        scaled_names = [name for name in tensors if name in self.scales]
        weights = {
            name: [module.get_parameter(path) for path in factory.find_paths(block, name)] for name in scaled_names
        }
        flat = [part.requires_grad_() for parts in weights.values() for part in parts]
        with torch.enable_grad():
            entering = given.to(factory.device).requires_grad_(True)
            leaving = stream.run(module, block, entering)
        entered, *slopes = torch.autograd.grad(
            leaving, [entering, *flat], gradient.to(leaving), allow_unused=True, materialize_grads=True
        )
        for name, parts in weights.items():
            slope = torch.cat([slopes.pop(0) for _ in parts]).float() * tensors[name].to(factory.device).float()
            outputs, inputs = self.scales[name]
            assert outputs.grad is not None
            assert inputs.grad is not None
            outputs.grad += slope @ inputs.detach()
            inputs.grad += outputs.detach() @ slope
        return entered.float().cpu()
