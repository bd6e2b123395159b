"""Training one pruned block to do what the dense one does (LaCo eq. 9; recovery/README.md, section 1)."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ckpt_prune.common.finite import all_finite
from ckpt_prune.job.training_settings import RecoverySettings
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.parallel.group import ALONE, Group
from ckpt_prune.stages.recovery.trainable import surviving_weights

_NOTHING = 1e-10
"""Error, as a share of the target's energy, below which there is nothing to recover: float32 rounding."""
_ATTEMPTS, _SLOWER = 3, 4.0
"""How often a block is trained until something is gained, each time at so many times smaller a rate."""
_MEASURED = 0.1
"""Share of the samples that errors are told of where none is held out."""
_DIVERGED = 10.0
"""Times the error at the start: training that gets there is lost."""

Progress = Callable[[int, float], None]
"""Told after each epoch its number and the mean training loss."""


@dataclass(frozen=True)
class SampleSplit:
    """Samples that are trained on and samples that errors are told of.

    Attributes:
        train: indices, int64, ascending.
        measured: the same; none that is trained on, unless nothing is held out.
    """

    train: Tensor
    measured: Tensor

    @classmethod
    def of(cls, samples: int, share: float) -> "Split":
        """Hold out a share, spread evenly over the samples: at least one and not all; or, for a share of 0, nothing.

        Raises:
            ValueError: fewer than two samples.
        """
        if samples < 2:
            raise ValueError("one sample cannot be split")
        count = min(max(1, round(samples * (share or _MEASURED))), samples - 1)
        measured = ((torch.arange(count) + 0.5) * samples / count).long()
        free = torch.ones(samples, dtype=torch.bool)
        free[measured] = share == 0
        return cls(free.nonzero().flatten(), measured)

    @property
    def samples(self) -> int:
        """How many there are in all."""
        # Where none are held out, some are in both.
        return len({*self.train.tolist(), *self.measured.tolist()})

    def sizes(self, settings: RecoverySettings, group: Group = ALONE) -> set[int]:
        """Numbers of samples that go through a block at once."""
        size = part_size(settings)
        if group.size > 1:  # of a batch, any number may be of one process
            return set(range(1, size + 1))
        trained = {len(part) for batch in cut(self.train, settings.batch) for part in cut(batch, size)}
        return trained | {len(part) for part in cut(self.measured, size)}


def cut(rows: Tensor, size: int) -> list[Tensor]:
    """Runs of `size` rows, the last one perhaps shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def rows_within(rows: Tensor, share: slice) -> Tensor:
    """Those of some rows that are in a run of them, counted from its start."""
    own: Tensor = rows[(rows >= share.start) & (rows < share.stop)].sub(share.start)
    return own


def part_size(settings: RecoverySettings) -> int:
    """Samples that go through a block at once."""
    return math.ceil(settings.batch / settings.accumulate)


@dataclass(frozen=True)
class TrainedBlock:
    """What training made of a block.

    Attributes:
        tensors: the block's tensors by on-disk name, in their dtypes; where nothing was gained, the given ones.
        epochs: how many were run, at all rates.
        best_epoch: the one whose weights were kept; 0: the old ones.
        rate: the learning rate they were trained at; None for the old ones.
        diverged: whether, at some rate, the loss stopped being finite or the error grew tenfold.
        curve: error on measured samples at the start and after every epoch at the last rate, as a share of the targets'
            energy.
    """

    tensors: dict[str, Tensor]
    epochs: int = 0
    best_epoch: int = 0
    rate: float | None = None
    diverged: bool = False
    curve: tuple[float, ...] = ()


def train_block(
    stream: HiddenStream,
    index: int,
    tensors: Mapping[str, Tensor],
    names: list[str],
    targets: Tensor,
    split: SampleSplit,
    settings: RecoverySettings,
    *,
    rate: float,
    seed: int,
    progress: Progress = lambda _epoch, _loss: None,
) -> TrainedBlock:
    """Minimise ‖Y − φ(H'; θ')‖² over the weights that are not zero, from the weights the block has.

    Masters and moments of Adam are float32; where the stream computes in a narrower type, so does the block, by
    autocast.
    After every epoch the weights, rounded to the dtype they are stored in, are tried on held-out samples. Those of the
    best epoch are kept, and the old ones where none is better, so the held-out error never grows. A block in which no
    epoch was better is trained again at a quarter of the rate, and once more at a sixteenth: what has lost little wants
    small steps. Where no samples are held out, the weights of the last epoch are kept, and there is one attempt.

    Args:
        stream: the pruned model's, at this block's input H'.
        index: of the block.
        tensors: the pruned block, by on-disk name.
        names: those of them that are trained.
        targets: Y, what the dense block makes of the dense model's stream, (N, T, hidden).
        split: samples to train on and samples to choose by.
        settings: of the optimiser.
        rate: learning rate.
        seed: of the order of samples, together with the index.
        progress: told of each epoch.
    """
    energies = [_energy(stream, split, targets, rows) for rows in (split.train, split.measured)]
    task = _Task(stream, index, dict(tensors), names, targets, split, settings, seed, progress, *energies)
    start = task.error(task.block())
    if not math.isfinite(start) or start <= _NOTHING or not names:
        return TrainedBlock(task.given)
    trained, epochs, diverged = TrainedBlock(task.given), 0, False
    group = stream.group
    for attempt in range(_ATTEMPTS if settings.held_out else 1):
        trained = task.train(rate / _SLOWER**attempt, start)
        epochs, diverged = epochs + trained.epochs, diverged or trained.diverged
        if trained.best_epoch:
            break
    # The same in all processes, but for what unlike machines round differently.
    return group.once(lambda: replace(trained, epochs=epochs, diverged=diverged))


@dataclass(frozen=True)
class _Task:
    """One block to be trained (`train_block`).

    Attributes:
        energy: mean ‖Y‖² of a sample that is trained on.
        measured_energy: of one that is measured on.
    """

    stream: HiddenStream
    index: int
    given: dict[str, Tensor]
    names: list[str]
    targets: Tensor
    split: SampleSplit
    settings: RecoverySettings
    seed: int
    progress: Progress
    energy: float
    measured_energy: float

    def _mine(self, rows: Tensor) -> Tensor:
        """Those of some samples that this process has, as it counts them."""
        return rows_within(rows, self.stream.group.share(self.split.samples))

    def block(self) -> "_Block":
        """The block as it was given."""
        return _Block(self.stream, self.index, self.given, self.names)

    def error(self, block: "_Block") -> float:
        """Σ‖Y − φ(H')‖² / Σ‖Y‖² over the measured samples, with weights as they would be stored."""
        parts = cut(self._mine(self.split.measured), part_size(self.settings))
        return block.error(self.targets, parts, self.measured_energy * len(self.split.measured))

    def train(self, rate: float, start: float) -> TrainedBlock:
        """Train the given block at one rate, from the error `start` on measured samples."""
        settings, block = self.settings, self.block()
        optimiser = torch.optim.Adam(block.parameters, lr=rate)
        order = torch.Generator().manual_seed((self.seed * 1_000_003 + self.index) % 2**63)
        steps = settings.epochs * math.ceil(len(self.split.train) / settings.batch)
        step, epoch, best_epoch, kept, diverged = 0, 0, 0, self.given, False
        best, lowest, lowest_epoch, curve = start, math.inf, 0, [start]
        for epoch in range(1, settings.epochs + 1):
            losses = []
            for rows in cut(self.split.train[torch.randperm(len(self.split.train), generator=order)], settings.batch):
                if settings.schedule == "cosine":
                    optimiser.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
                parts = cut(self._mine(rows), part_size(settings))
                losses.append(block.step(optimiser, self.targets, parts, self.energy * len(rows)))
                step += 1
                if not math.isfinite(losses[-1]):
                    break
            self.progress(epoch, sum(losses) / len(losses))
            error = self.error(block) if math.isfinite(losses[-1]) else math.nan
            curve.append(error)
            diverged = not error <= _DIVERGED * start
            if diverged:
                break
            if error < best or not settings.held_out:
                best, best_epoch, kept = error, epoch, block.stored()
            # Not against the start: a high rate may lie above it for epochs, and get below when the cosine brings it
            # down.
            if error < lowest:
                lowest, lowest_epoch = error, epoch
            elif settings.held_out and epoch - lowest_epoch >= settings.patience:
                break
        return TrainedBlock(kept, epoch, best_epoch, rate if best_epoch else None, diverged, tuple(curve))


class _Block:
    """A block in training.

    Args:
        stream: runs it.
        index: of the block.
        tensors: it starts from, by on-disk name.
        names: those of them that are trained.
    """

    def __init__(self, stream: HiddenStream, index: int, tensors: dict[str, Tensor], names: list[str]) -> None:
        self._stream, self._index, self._tensors = stream, index, tensors
        factory = stream.factory
        # Copies: a parameter of the tensor's own dtype would share its memory, and the optimiser writes in place.
        self._dtype = torch.promote_types(factory.dtype, torch.float32)
        masters = {name: tensors[name].to(self._dtype, copy=True) for name in names}
        self._module = factory.build_block(index, tensors | masters, dtype=self._dtype)
        self._parts: dict[str, list[nn.Parameter]] = {
            name: [self._module.get_parameter(path) for path in factory.find_paths(index, name)] for name in names
        }
        for name, parts in self._parts.items():
            for parameter, free in zip(parts, surviving_weights(tensors, name).chunk(len(parts)), strict=True):
                parameter.requires_grad_()
                # Adam leaves alone what never had a gradient: zeros stay zeros, exactly.
                if not free.all():
                    parameter.register_hook(_Masked(~free.to(factory.device)))  # type: ignore[no-untyped-call]
        for parameter in self._module.parameters():
            if not parameter.requires_grad:
                # As in the stream's own blocks: what is not trained must not look like an error to be trained away.
                parameter.data = parameter.data.to(factory.dtype)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are trained."""
        return [parameter for parts in self._parts.values() for parameter in parts]

    def step(self, optimiser: torch.optim.Optimizer, targets: Tensor, parts: list[Tensor], scale: float) -> float:
        """One step of the optimiser on the samples of `parts`; the squared error over `scale` before it."""
        optimiser.zero_grad()
        total = 0.0
        for rows in parts:
            loss = self._squared_error(targets, rows) / scale
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        total = self._pooled(total)
        if math.isfinite(total):
            optimiser.step()
        return total

    def _pooled(self, loss: float) -> float:
        """The loss of all processes, whose gradients become those of all."""
        group = self._stream.group
        if group.size > 1:
            for parameter in self.parameters:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = group.add_for_all(own)
        return group.total(loss)

    @torch.no_grad()
    def error(self, targets: Tensor, parts: list[Tensor], scale: float) -> float:
        """Squared error over `scale` on the samples of `parts`, weights as they would be stored; not always finite."""
        with self._rounded():
            # What overflowed in its stored dtype may hide behind a ReLU, where the error is finite.
            if not all(map(all_finite, self.parameters)):
                return math.nan
            own = sum(float(self._squared_error(targets, rows)) for rows in parts)
            return self._stream.group.total(own) / scale

    def stored(self) -> dict[str, Tensor]:
        """The block's tensors as they are now, in the dtypes they came in, on CPU."""
        new = {
            name: torch.cat([p.detach() for p in parts]).to("cpu", self._tensors[name].dtype, copy=True)
            for name, parts in self._parts.items()
        }
        return self._tensors | new

    def _squared_error(self, targets: Tensor, rows: Tensor) -> Tensor:
        factory = self._stream.factory
        low = factory.dtype != self._dtype
        with torch.autocast(factory.device.type, factory.dtype if low else None, enabled=low):
            output = self._stream.run(self._module, self._index, self._stream.states[rows])
        return (output.to(self._dtype) - targets[rows].to(factory.device, self._dtype)).square().sum()

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """The parameters as their stored dtype holds them."""
        dtypes = [self._tensors[name].dtype for name, parts in self._parts.items() for _ in parts]
        rounded = [(p, dtype) for p, dtype in zip(self.parameters, dtypes, strict=True) if dtype != p.dtype]
        masters = [p.detach().clone() for p, _ in rounded]
        for parameter, dtype in rounded:
            parameter.copy_(parameter.to(dtype))
        try:
            yield
        finally:
            for (parameter, _), master in zip(rounded, masters, strict=True):
                parameter.copy_(master)


class _Masked:
    """Keeps a gradient where weights survive.

    Args:
        fixed: where they do not, bool of the gradient's shape.
    """

    def __init__(self, fixed: Tensor) -> None:
        self._fixed = fixed

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient with zeros there, also where it is not finite."""
        return gradient.masked_fill(self._fixed, 0)


def _energy(stream: HiddenStream, split: SampleSplit, targets: Tensor, rows: Tensor) -> float:
    """Mean over the samples `rows` of ‖Y‖²."""
    parts = cut(rows_within(rows, stream.group.share(split.samples)), 8)
    own = sum(float(targets[part].float().square().sum(dtype=torch.float64)) for part in parts)
    total = stream.group.total(own)
    return total / len(rows) if total > 0 else 1.0
