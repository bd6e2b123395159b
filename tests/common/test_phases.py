"""Phases take turns: a second counts for the innermost one alone."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from ckpt_prune.common import phases
from ckpt_prune.common.phases import phase, time_phases
from ckpt_prune.job.timing import PhaseTimer


@pytest.fixture
def at(monkeypatch):
    """Sets the clock."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return lambda now: setattr(clock, "now", now)


def test_a_second_counts_for_the_innermost_phase_alone(at):
    @phase("ranking")
    def rank(until: float) -> None:
        at(until)

    with time_phases() as clock:
        at(100.0)
        with phase("compensation"):
            at(103.0)
            rank(110.0)
            at(110.5)
        at(1000.0)
        rank(1001.0)
    assert clock.seconds == {"compensation": 3.5, "ranking": 8.0}


def test_what_fails_ends_its_phase(at):
    with time_phases() as clock:
        with suppress(KeyError), phase("calibration"):
            at(2.0)
            raise KeyError
        at(50.0)
    assert clock.seconds == {"calibration": 2.0}


def test_each_stage_has_its_phases_and_outside_of_stages_none_is_timed(at):
    with phase("ranking"):
        at(5.0)
    timer = PhaseTimer(torch.device("cpu"))
    with timer.time("first"), phase("ranking"):
        at(6.25)
    with timer.time("second"):
        at(9.0)
    assert [stage.phases for stage in timer.records] == [{"ranking": 1.25}, {}]
