"""Train one pruned block to do what the dense one does (LaCo eq. 9; stages/recovery/README.md, section 1)."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.family import KINDS, Family
from ckpt_prune.model.skeleton import is_stored_buffer
from ckpt_prune.options.training import Part, RecoverySettings
from ckpt_prune.stages.recovery.training import Objective, Progress, SampleSplit, Trained, cut, part_size, train
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

Tensors = dict[str, Tensor]


def rows_within(rows: Tensor, share: slice) -> Tensor:
    """Return the rows that are in a share of all rows, counted from its start."""
    inside: Tensor = rows[(rows >= share.start) & (rows < share.stop)].sub(share.start)
    return inside


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
    progress: Progress = lambda _epoch, _error: None,
) -> Trained[Tensors]:
    """Minimise ‖Y − φ(H'; θ')‖² over the weights that are not zero, from the weights the block has (Adam).

    A block in which no epoch was better is trained again at a quarter of the rate, and once more at a sixteenth: a
    block that has lost little needs small steps. If no samples are held out, there is one attempt.

    Args:
        stream: of the pruned model, at this block's input H'.
        tensors: of the pruned block, by on-disk name.
        names: of the tensors that are trained.
        targets: Y, the output of the dense block on the dense model's stream, (N, T, hidden).
        seed: of the order of samples, together with the index.

    Returns:
        The block's tensors, in the dtypes they came in, and errors as shares of the targets' energy. The curve is that
        of the last rate; epochs are those at all rates.
    """
    if not names:
        return Trained()
    objective = BlockObjective(stream, index, tensors, names, targets, split, part_size(settings))
    epochs, diverged = 0.0, False
    for attempt in range(_ATTEMPTS if settings.held_out else 1):
        objective.reset()
        optimizer = torch.optim.Adam(objective.parameters, lr=rate / _SLOWER**attempt)
        order = (seed * 1_000_003 + index) % 2**63
        trained = train(objective, optimizer, split, settings, seed=order, progress=progress)
        epochs, diverged = epochs + trained.epochs, diverged or trained.diverged
        if trained.best_epoch or not trained.epochs:
            break
    if not epochs:
        return Trained()
    # The same in all processes, but for what unlike machines round differently.
    return stream.group.once(lambda: replace(trained, epochs=epochs, diverged=diverged))


class BlockObjective(Objective[Tensors]):
    """Squared error of a block's output, as a share of the targets' energy.

    Masters are float32; if the stream computes in a narrower type, so does the block, by autocast.

    Args: as in `train_block`.
        part: samples that go through the block at once.
    """

    nothing = _NOTHING

    def __init__(
        self,
        stream: HiddenStream,
        index: int,
        tensors: Mapping[str, Tensor],
        names: list[str],
        targets: Tensor,
        split: SampleSplit,
        part: int,
    ) -> None:
        self._stream, self._index, self._tensors, self._targets = stream, index, dict(tensors), targets
        self._part, self._share = part, stream.group.share(split.samples)
        self._train_energy, self._measured_energy = (self._mean_energy(rows) for rows in (split.train, split.measured))
        factory = stream.factory
        # Copies: a parameter of the tensor's own dtype would share its memory, and the optimizer writes in place.
        self._dtype = torch.promote_types(factory.dtype, torch.float32)
        masters = {name: tensors[name].to(self._dtype, copy=True) for name in names}
        self._module = factory.build_block(index, self._tensors | masters, dtype=self._dtype)
        self._parts: dict[str, list[nn.Parameter]] = {
            name: [self._module.get_parameter(path) for path in factory.find_paths(index, name)] for name in names
        }
        self.parameters = [parameter for parts in self._parts.values() for parameter in parts]
        for name, parts in self._parts.items():
            for parameter, free in zip(parts, factory.split(name, surviving_weights(tensors, name)), strict=True):
                parameter.requires_grad_()
                # Adam leaves alone what never had a gradient: zeros stay zeros, exactly.
                if not free.all():
                    fixed = ~free.to(factory.device)
                    parameter.register_hook(partial(torch.masked_fill, mask=fixed, value=0))  # type: ignore[no-untyped-call]
        for parameter in self._module.parameters():
            if not parameter.requires_grad:
                # As in the stream's own blocks: what is not trained must not look like an error to be trained away.
                parameter.data = parameter.data.to(factory.dtype)

    @torch.no_grad()
    def reset(self) -> None:
        """Begin anew, with the tensors that were given."""
        for name, parts in self._parts.items():
            for parameter, value in zip(parts, self._stream.factory.split(name, self._tensors[name]), strict=True):
                parameter.copy_(value)

    def add_gradients(self, rows: Tensor) -> None:
        for part in self._own_parts(rows):
            error = self._squared_error(part) / (self._train_energy * len(rows))
            error.backward()  # type: ignore[no-untyped-call]
        group = self._stream.group
        if group.size > 1:
            for parameter in self.parameters:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = group.spread(group.add(gradient))

    @torch.no_grad()
    def loss(self, rows: Tensor) -> float:
        with self._round_parameters():
            # What overflowed in its stored dtype may hide behind a ReLU, where the error is finite.
            if not all(map(all_finite, self.parameters)):
                return math.nan
            error = sum(float(self._squared_error(part)) for part in self._own_parts(rows))
            return self._stream.group.total(error) / (self._measured_energy * len(rows))

    def keep(self) -> Tensors:
        new = {
            name: torch.cat([p.detach() for p in parts]).to("cpu", self._tensors[name].dtype, copy=True)
            for name, parts in self._parts.items()
        }
        return self._tensors | new

    def _own_parts(self, rows: Tensor) -> list[Tensor]:
        """Return those of some samples that this process has, numbered as it counts them, in parts."""
        return cut(rows_within(rows, self._share), self._part)

    def _mean_energy(self, rows: Tensor) -> float:
        """Return the mean of ‖Y‖² over samples."""
        parts = cut(rows_within(rows, self._share), 8)
        energy = sum(float(self._targets[part].float().square().sum(dtype=torch.float64)) for part in parts)
        total = self._stream.group.total(energy)
        return total / len(rows) if total > 0 else 1.0

    def _squared_error(self, rows: Tensor) -> Tensor:
        factory = self._stream.factory
        low = factory.dtype != self._dtype
        with torch.autocast(factory.device.type, factory.dtype if low else None, enabled=low):
            output = self._stream.run(self._module, self._index, self._stream.states[rows], rows)
        return (output.to(self._dtype) - self._targets[rows].to(factory.device, self._dtype)).square().sum()

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
