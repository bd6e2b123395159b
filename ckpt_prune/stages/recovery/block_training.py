"""Train one pruned block to do what the dense one does (LaCo eq. 9; stages/recovery/README.md, section 1)."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.family import KINDS, Family
from ckpt_prune.model.skeleton import is_stored_buffer
from ckpt_prune.options.training import Part, RecoverySettings
from ckpt_prune.parallel.group import ALONE, Group
from ckpt_prune.stages.rotation.rotated_checkpoint import ENTRY, EXIT


def trainable_tensors(
    family: Family, block: int, tensors: Mapping[str, Tensor], only: Part | None = None, *, norms: bool = False
) -> list[str]:
    """List the on-disk names of a block's weights and biases that are trained: those of its linear modules.

    Modules that turn the residual stream are no target of pruning and stay, as do norms unless they are asked for.

    Args:
        only: its mlp or its attention alone.
        norms: train what a block has beside its linear modules, too: norms, layer scales.
    """
    names = [family.tensor(block, module, kind) for module in family.linears_of(only) for kind in KINDS]
    trained = [name for name in names if name in tensors]
    if norms:
        prefix = family.block.format(block=block)
        linear = {family.tensor(block, module, kind) for module in family.linears for kind in KINDS}
        fixed = (f"{prefix}{ENTRY}", f"{prefix}{EXIT}")
        others = [name for name in tensors if name.startswith(prefix) and name not in linear]
        # What is no floating point number tells of the block's shape.
        others = [name for name in others if tensors[name].is_floating_point() and not name.startswith(fixed)]
        trained += sorted(name for name in others if not is_stored_buffer(name))
    return trained


def surviving_weights(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return which elements of a tensor are free to change, bool of its shape (LaCo eq. 9, the support of the mask).

    In a weight these are the elements that are not zero. In a bias they are all but the zeros of rows whose whole
    weight is zero: there a padded container holds a dropped unit. A norm is free: its zeros are values like any.
    """
    tensor = tensors[name]
    weight = tensors.get(f"{name.rpartition('.')[0]}.weight", tensor)
    if weight.dim() == 1:
        return torch.ones_like(tensor, dtype=torch.bool)
    if not name.endswith(".bias"):
        return tensor != 0
    rows = (weight != 0).any(1)
    return rows | (tensor != 0)


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
    """Samples to train on and samples to measure errors on.

    Attributes:
        train: indices, int64, ascending.
        measured: the same; none of them is trained on, unless nothing is held out.
    """

    train: Tensor
    measured: Tensor

    @classmethod
    def of(cls, samples: int, share: float) -> "SampleSplit":
        """Hold out a share, spread evenly over the samples: at least one and not all; or, for a share of 0, nothing."""
        if samples < 2:
            raise ValueError("one sample cannot be split")
        count = min(max(1, round(samples * (share or _MEASURED))), samples - 1)
        measured = ((torch.arange(count) + 0.5) * samples / count).long()
        free = torch.ones(samples, dtype=torch.bool)
        free[measured] = share == 0
        return cls(free.nonzero().flatten(), measured)

    @property
    def samples(self) -> int:
        # Where none are held out, some are in both.
        return len({*self.train.tolist(), *self.measured.tolist()})

    def sizes(self, settings: RecoverySettings, group: Group = ALONE) -> set[int]:
        """Return the numbers of samples that go through a block at once."""
        size = part_size(settings)
        if group.size > 1:  # of a batch, any number may be of one process
            return set(range(1, size + 1))
        trained = {len(part) for batch in cut(self.train, settings.batch) for part in cut(batch, size)}
        return trained | {len(part) for part in cut(self.measured, size)}


def cut(rows: Tensor, size: int) -> list[Tensor]:
    """Cut rows into runs of `size`, the last one perhaps shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def rows_within(rows: Tensor, share: slice) -> Tensor:
    """Return the rows that are in a share of all rows, counted from its start."""
    inside: Tensor = rows[(rows >= share.start) & (rows < share.stop)].sub(share.start)
    return inside


def part_size(settings: RecoverySettings) -> int:
    """Return how many samples go through a block at once."""
    return math.ceil(settings.batch / settings.accumulate)


@dataclass(frozen=True)
class TrainedBlock:
    """A block after training.

    Attributes:
        tensors: by on-disk name, in their dtypes; the given ones if nothing was gained.
        epochs: run at all rates.
        best_epoch: its weights were kept; 0: the old ones.
        rate: the learning rate of the kept weights; None for the old ones.
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

    Masters and moments of Adam are float32; if the stream computes in a narrower type, so does the block, by autocast.
    After every epoch the weights, rounded to the dtype they are stored in, are tried on held-out samples. Those of the
    best epoch are kept, and the old ones if none is better, so the held-out error never grows. A block in which no
    epoch was better is trained again at a quarter of the rate, and once more at a sixteenth: a block that has lost
    little needs small steps. If no samples are held out, the weights of the last epoch are kept, and there is one
    attempt.

    Args:
        stream: of the pruned model, at this block's input H'.
        tensors: of the pruned block, by on-disk name.
        names: of the tensors that are trained.
        targets: Y, the output of the dense block on the dense model's stream, (N, T, hidden).
        seed: of the order of samples, together with the index.
    """
    energies = [_energy(stream, split, targets, rows) for rows in (split.train, split.measured)]
    task = _Attempt(stream, index, dict(tensors), names, targets, split, settings, seed, progress, *energies)
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
class _Attempt:
    """One block to be trained (`train_block`).

    Attributes:
        energy: mean ‖Y‖² of a training sample.
        measured_energy: mean ‖Y‖² of a measured sample.
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

    def _of_this_process(self, rows: Tensor) -> Tensor:
        """Return those of some samples that this process has, numbered as it counts them."""
        return rows_within(rows, self.stream.group.share(self.split.samples))

    def block(self) -> "_Block":
        return _Block(self.stream, self.index, self.given, self.names)

    def error(self, block: "_Block") -> float:
        """Return Σ‖Y − φ(H')‖² / Σ‖Y‖² over the measured samples, with weights as they would be stored."""
        parts = cut(self._of_this_process(self.split.measured), part_size(self.settings))
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
                parts = cut(self._of_this_process(rows), part_size(settings))
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
                best, best_epoch, kept = error, epoch, block.to_stored()
            # Not against the start: a high rate may lie above it for epochs, and get below when the cosine brings it
            # down.
            if error < lowest:
                lowest, lowest_epoch = error, epoch
            elif settings.held_out and epoch - lowest_epoch >= settings.patience:
                break
        return TrainedBlock(kept, epoch, best_epoch, rate if best_epoch else None, diverged, tuple(curve))


class _Block:
    """A block in training: `names` are those of its tensors that are trained."""

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
        return [parameter for parts in self._parts.values() for parameter in parts]

    def step(self, optimiser: torch.optim.Optimizer, targets: Tensor, parts: list[Tensor], scale: float) -> float:
        """Take one step of the optimiser on the samples of `parts`; return the squared error over `scale` before it."""
        optimiser.zero_grad()
        total = 0.0
        for rows in parts:
            loss = self._squared_error(targets, rows) / scale
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        total = self._pool(total)
        if math.isfinite(total):
            optimiser.step()
        return total

    def _pool(self, loss: float) -> float:
        """Return the loss of all processes, and give all of them the sum of their gradients."""
        group = self._stream.group
        if group.size > 1:
            for parameter in self.parameters:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = group.spread(group.add(gradient))
        return group.total(loss)

    @torch.no_grad()
    def error(self, targets: Tensor, parts: list[Tensor], scale: float) -> float:
        """Return the squared error over `scale` on the samples of `parts`, with weights as they would be stored.

        It is not always finite.
        """
        with self._round_parameters():
            # What overflowed in its stored dtype may hide behind a ReLU, where the error is finite.
            if not all(map(all_finite, self.parameters)):
                return math.nan
            error = sum(float(self._squared_error(targets, rows)) for rows in parts)
            return self._stream.group.total(error) / scale

    def to_stored(self) -> dict[str, Tensor]:
        """Return the block's tensors as they are now, in the dtypes they came in, on CPU."""
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
    def _round_parameters(self) -> Iterator[None]:
        """Hold the parameters as their stored dtype does, for a while."""
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
    """Zeroes a gradient at weights that are fixed, bool of its shape."""

    def __init__(self, fixed: Tensor) -> None:
        self._fixed = fixed

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient.masked_fill(self._fixed, 0)


def _energy(stream: HiddenStream, split: SampleSplit, targets: Tensor, rows: Tensor) -> float:
    """Return the mean of ‖Y‖² over the samples `rows`."""
    parts = cut(rows_within(rows, stream.group.share(split.samples)), 8)
    energy = sum(float(targets[part].float().square().sum(dtype=torch.float64)) for part in parts)
    total = stream.group.total(energy)
    return total / len(rows) if total > 0 else 1.0
