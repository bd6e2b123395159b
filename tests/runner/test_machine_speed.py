"""Measuring the machine: that every rate is one, and that it is done once."""

import dataclasses
import importlib
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from ckpt_prune.runner.estimate import machine_speed as machine


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch):
    """The module as it is outside of tests, which see one machine only."""
    monkeypatch.delitem(sys.modules, "ckpt_prune.runner.estimate.machine_speed")
    own = importlib.import_module("ckpt_prune.runner.estimate.machine_speed")
    monkeypatch.setitem(sys.modules, "ckpt_prune.runner.estimate.machine_speed", machine)
    return own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rate_is_a_number_above_nothing(real, dtype):
    rates = real.measured_rates(torch.device("cpu"), dtype)
    for field in dataclasses.fields(rates):
        value = getattr(rates, field.name)
        assert math.isfinite(value), field.name
        assert value > 0, field.name


def test_a_machine_is_measured_once(real, monkeypatch):
    first = real.measured_rates(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(real, "_disk_seconds", lambda: pytest.fail("measured again"))
    assert real.measured_rates(torch.device("cpu"), torch.float32) is first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_of_what_was_done(real, monkeypatch, dtype):
    """A clock that moves a second at each look: every count takes one."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(real, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    rates = real.measured_rates(torch.device("cpu"), dtype)
    assert (rates.gemm, rates.single, rates.wide) == (2 * 2048 * 576 * 576, 2 * 2048 * 576 * 576, 2 * 384**3)
    assert rates.grams == 2 * 2048 * (256 * 256 + 256 * 512 + 64 * 576)  # strips of 256 columns, one triangle
    assert (rates.factor, rates.eigen) == (384**3 / 3, 9 * 192**3)
    assert (rates.moved, rates.reduced) == (8 * 4096 * 1024, 4096 * 1024)
    assert (rates.calls, rates.disk, rates.hashed) == (500, 2**24, 2**22)


def test_threads_that_wait_for_each_other_are_not_the_machines_speed(real, monkeypatch):
    """On a machine that is loaded, a small decomposition took thirty times as long with two threads as with one."""
    plain, before, now = torch.linalg.eigh, torch.get_num_threads(), [0.0]

    def look():
        now[0] += 1
        return now[0]

    def waiting(matrix):
        if torch.get_num_threads() > 1:
            now[0] += 29
        return plain(matrix)

    monkeypatch.setattr(real, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(torch.linalg, "eigh", waiting)
    torch.set_num_threads(2)
    try:
        rates = real.measured_rates(torch.device("cpu"), torch.float32)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert rates.eigen == 9 * 192**3
