"""The training loop of recovery: its samples, schedule, patience and best epoch. What is trained is an `Objective`."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ckpt_prune.options.training import RecoverySettings, Schedule
from ckpt_prune.parallel.group import ALONE, Group

Kept = TypeVar("Kept")
Progress = Callable[[int, float], None]
"""Told after each epoch its number and the loss on measured samples."""

_MEASURED = 0.1
"""Share of the samples that losses are measured on if none is held out."""
_DIVERGED = 10.0
"""Times the loss at the start: training that gets there is lost."""


@dataclass(frozen=True)
class SampleSplit:
    """Samples to train on and samples to measure losses on.

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


def part_size(settings: RecoverySettings) -> int:
    """Return how many samples go through a block at once."""
    return math.ceil(settings.batch / settings.accumulate)


class Objective(ABC, Generic[Kept]):
    """The tensors that are trained, and their loss. Samples are given by their numbers, int64.

    Attributes:
        parameters: the tensors that are trained, at least one.
        nothing: nothing is trained if the loss at the start is at most this.
    """

    parameters: Sequence[Tensor]
    nothing: ClassVar[float] = 0.0

    def climb(self, steps: int) -> float:
        """Return over how many of all steps the learning rate climbs to the highest."""
        return 0.0

    @abstractmethod
    def add_gradients(self, rows: Tensor) -> None:
        """Add the gradients of a batch's mean loss to those of the parameters."""

    @abstractmethod
    def loss(self, rows: Tensor) -> float:
        """Return the mean loss of samples, with weights as they would be stored now. It is not always finite."""

    @abstractmethod
    def keep(self) -> Kept:
        """Return a copy of what was trained, as it would be stored now."""


@dataclass(frozen=True)
class Trained(Generic[Kept]):
    """Result of training; by default, that nothing was trained.

    Attributes:
        kept: what the best epoch has made; None if no epoch was better than the start.
        best_epoch: its number; 0 if none was better.
        curve: loss on measured samples at the start and after every epoch.
        diverged: whether the loss stopped being finite, or grew tenfold.
        rate: the highest learning rate of all steps.
        epochs: passes over the training samples.
        seconds: of training, measuring included.
        parameters: numbers that were trained.
    """

    kept: Kept | None = None
    best_epoch: int = 0
    curve: tuple[float, ...] = ()
    diverged: bool = False
    rate: float = 0.0
    steps: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    parameters: int = 0

    @property
    def loss_before(self) -> float:
        return self.curve[0]

    @property
    def loss_after(self) -> float:
        """The loss on measured samples of what is kept; that at the start if nothing was gained."""
        return self.curve[self.best_epoch]


def train(
    objective: Objective[Kept],
    optimizer: torch.optim.Optimizer,
    split: SampleSplit,
    settings: RecoverySettings,
    *,
    seed: int,
    before: float | None = None,
    seconds: float | None = None,
    progress: Progress = lambda _epoch, _loss: None,
) -> Trained[Kept]:
    """Train an objective, and keep what its best epoch has made.

    After every epoch the loss is measured. The best epoch is kept if it is better than the start, and training ends
    when the loss has not fallen for `patience` epochs. If no samples are held out, the last epoch that is better than
    the start is kept. Training that diverges ends.

    Args:
        optimizer: holds the objective's parameters, and begins at the highest learning rate.
        settings: `epochs`, `batch`, `schedule`, `patience` and whether samples are held out.
        seed: decides the order of samples.
        before: the loss at the start, if it was measured already.
        seconds: training ends after these, whatever `epochs` says.
    """
    began, steps = time.monotonic(), settings.epochs * math.ceil(len(split.train) / settings.batch)
    rate, order = optimizer.param_groups[0]["lr"], torch.Generator().manual_seed(seed)
    kept, best_epoch, step, seen = None, 0, 0, 0
    curve, diverged = [objective.loss(split.measured) if before is None else before], False

    def done() -> float:
        """Return the steps that are done, or as many as the time that is gone is worth."""
        return step if seconds is None else min(steps, max(step, steps * (time.monotonic() - began) / seconds))

    epochs = settings.epochs if math.isfinite(curve[0]) and curve[0] > objective.nothing else 0
    for epoch in range(1, epochs + 1):
        for rows in cut(split.train[torch.randperm(len(split.train), generator=order)], settings.batch):
            optimizer.zero_grad()
            objective.add_gradients(rows)
            for group in optimizer.param_groups:
                group["lr"] = rate * share_of_rate(done(), steps, settings.schedule, objective.climb(steps))
            optimizer.step()
            step, seen = step + 1, seen + len(rows)
            if done() >= steps:
                break
        loss = objective.loss(split.measured)
        curve.append(loss)
        progress(epoch, loss)
        diverged = not loss <= _DIVERGED * curve[0]
        if diverged:
            break
        if loss < curve[best_epoch if settings.held_out else 0]:
            best_epoch, kept = epoch, objective.keep()
        # Not against the start: a high rate may lie above it for epochs, and get below when the cosine brings it down.
        lowest = 1 + curve[1:].index(min(curve[1:]))
        if done() >= steps or (settings.held_out and epoch - lowest >= settings.patience):
            break
    count, elapsed = sum(parameter.numel() for parameter in objective.parameters), time.monotonic() - began
    return Trained(kept, best_epoch, tuple(curve), diverged, rate, step, seen / len(split.train), elapsed, count)


def share_of_rate(step: float, steps: int, schedule: Schedule, climb: float = 0.0) -> float:
    """Return the learning rate of a step as a share of the highest.

    It falls to zero along a cosine or in a line, or is constant; over the first steps it climbs in a line. With linear
    it begins at zero and falls from the last of these on, as transformers' Trainer has it.
    """
    if schedule == "linear":
        return step / climb if step < climb else (steps - step) / max(1.0, steps - climb)
    climbed = min(1.0, (step + 1) / max(1.0, climb))
    return climbed if schedule == "constant" else climbed * (1 + math.cos(math.pi * step / steps)) / 2
