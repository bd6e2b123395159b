"""The training loop: batches, rates, which epoch is kept and when it ends. What is trained is a stub here."""

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from ckpt_prune.stages.recovery import training
from ckpt_prune.stages.recovery.training import Objective, SampleSplit, Trained, train

from .twins import settings

SPLIT = SampleSplit.of(9, 0.2)
"""Seven to train on: two batches of three, and one of one."""


class Scripted(Objective[str]):
    """Its losses are given, and its gradient is one, so that the parameter falls by the rates of plain descent."""

    nothing = 0.1

    def __init__(self, losses: Sequence[float], climb: float = 0.0) -> None:
        self._climb = climb
        self.parameters = [torch.zeros(2, dtype=torch.float64, requires_grad=True)]
        self._losses = iter(losses)
        self.batches: list[list[int]] = []
        self.places: list[float] = []

    def climb(self, steps: int) -> float:
        return self._climb

    @property
    def rates(self) -> list[float]:
        places = [*self.places, float(self.parameters[0].detach()[1])]
        return [before - after for before, after in itertools.pairwise(places)]

    def add_gradients(self, rows: Tensor) -> None:
        self.batches.append(rows.tolist())
        self.places.append(float(self.parameters[0].detach()[0]))
        self.parameters[0].sum().backward()

    def loss(self, rows: Tensor) -> float:
        assert torch.equal(rows, SPLIT.measured)
        return next(self._losses)

    def keep(self) -> str:
        return f"after step {len(self.batches)}"


def go(objective: Scripted, rate: float = 1.0, *, changes: dict[str, Any], **options: Any) -> Trained[str]:
    optimizer = torch.optim.SGD(objective.parameters, lr=rate)
    return train(objective, optimizer, SPLIT, settings(**changes), **{"seed": 5} | options)


def test_every_epoch_takes_each_training_sample_once_in_an_order_of_its_own():
    objective, told = Scripted([3, 2, 1]), []
    trained = go(objective, 0.5, changes={"epochs": 2}, progress=lambda epoch, loss: told.append((epoch, loss)))
    generator = torch.Generator().manual_seed(5)
    orders = [SPLIT.train[torch.randperm(7, generator=generator)].tolist() for _ in range(2)]
    assert objective.batches == [part for order in orders for part in (order[:3], order[3:6], order[6:])]
    assert told == [(1, 2), (2, 1)]
    assert (trained.kept, trained.steps, trained.epochs, trained.rate, trained.parameters) == (
        "after step 6",
        6,
        2.0,
        0.5,
        2,
    )
    assert (trained.loss_before, trained.loss_after, trained.curve) == (3, 1, (3, 2, 1))


@pytest.mark.parametrize("climb", [0, 2.5, 4])
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_rates_climb_in_a_line_and_fall_along_a_cosine(schedule: str, climb: float):
    objective = Scripted(range(9, 0, -1), climb)
    go(objective, 0.25, changes={"epochs": 4, "schedule": schedule})
    falls = [math.cos(math.pi * step / 24) ** 2 if schedule == "cosine" else 1.0 for step in range(12)]
    climbs = [min(1.0, (step + 1) / climb) if climb else 1.0 for step in range(12)]
    assert objective.rates == pytest.approx([0.25 * a * b for a, b in zip(falls, climbs, strict=True)], rel=1e-12)


HELD_OUT, ALL = {"held_out": 0.2}, {"held_out": 0.0}


@pytest.mark.parametrize(
    ("losses", "changes", "best", "diverged"),
    [
        ([5, 4, 3, 3.5], HELD_OUT, 2, False),
        ([5, 5, 6, 5], HELD_OUT | {"patience": 2, "epochs": 9}, 0, False),
        ([5, 4, 4.1, 4.2], HELD_OUT | {"patience": 2, "epochs": 9}, 1, False),
        # A high rate lies above the start for epochs: what counts is that the loss falls.
        ([5, 8, 7, 6, 4, 4], HELD_OUT | {"patience": 1, "epochs": 9}, 4, False),
        ([5, 8, 9], HELD_OUT | {"patience": 1, "epochs": 9}, 0, False),
        # Where nothing is held out, the last one that is better than the start.
        ([5, 3, 4], ALL, 2, False),
        ([5, 3, 6, 4.9, 5], ALL | {"patience": 1}, 3, False),
        ([5, 50, 4], HELD_OUT, 2, False),
        ([5, 0.4, 4.5], HELD_OUT, 1, False),
        ([5, 4, 50.1], HELD_OUT | {"epochs": 9}, 1, True),
        ([5, 4, math.nan], ALL | {"epochs": 9}, 1, True),
        ([5, math.inf], HELD_OUT | {"epochs": 9}, 0, True),
        ([math.nan], HELD_OUT | {"epochs": 9}, 0, False),
        ([0.1], HELD_OUT | {"epochs": 9}, 0, False),
    ],
)
def test_the_best_epoch_is_kept_and_training_ends_in_time(
    losses: list[float], changes: dict[str, Any], best: int, diverged: bool
):
    epochs = len(losses) - 1
    trained = go(Scripted(losses), changes={"epochs": epochs} | changes)
    assert (trained.epochs, trained.steps) == (epochs, 3 * epochs)
    assert (trained.best_epoch, trained.diverged) == (best, diverged)
    assert trained.kept == (f"after step {3 * best}" if best else None)


def test_a_loss_that_is_known_is_not_measured_again():
    assert go(Scripted([1]), changes={"epochs": 1}, before=4.0).curve == (4, 1)


def test_training_ends_by_the_clock_and_rates_follow_it(monkeypatch: pytest.MonkeyPatch):
    """A step takes two seconds of nine: the fifth is the last, in the middle of the second epoch."""
    objective = Scripted([5, 4, 3])
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: 2.0 * len(objective.batches)))
    trained = go(objective, changes={"epochs": 99}, seconds=9.0)
    assert (trained.steps, trained.epochs, trained.kept) == (5, 13 / 7, "after step 5")
    assert objective.rates == pytest.approx(
        [math.cos(math.pi * min(9, 2 * done) / 18) ** 2 for done in range(1, 6)], abs=1e-12
    )


@hypothesis_settings(deadline=None)
@given(samples=st.integers(2, 3000), share=st.floats(1e-6, 1 - 1e-6))
def test_a_split_holds_out_some_evenly_and_trains_on_the_others(samples: int, share: float):
    split = SampleSplit.of(samples, share)
    train, held_out = split.train.tolist(), split.measured.tolist()
    assert sorted(train + held_out) == list(range(samples))
    assert train == sorted(train)
    assert held_out == sorted(held_out)
    assert train
    assert held_out
    assert len(held_out) == 1 or len(train) == 1 or abs(len(held_out) - samples * share) <= 0.5
    # Any run from the start has its share, to within one sample.
    counts = itertools.accumulate(int(i in set(held_out)) for i in range(samples)) if samples < 300 else ()
    for seen, count in enumerate(counts, 1):
        assert abs(count - seen * len(held_out) / samples) <= 1


def test_where_nothing_is_held_out_a_tenth_is_measured_and_all_are_trained_on():
    split = SampleSplit.of(20, 0)
    assert (split.train.tolist(), split.measured.tolist()) == (list(range(20)), [5, 15])


@pytest.mark.parametrize("samples", [0, 1])
def test_too_few_samples_to_split(samples: int):
    with pytest.raises(ValueError, match="split"):
        SampleSplit.of(samples, 0.5)
