"""Stages: wall time and memory, as another clock and the system see them."""

from types import SimpleNamespace

import pytest
import torch

from ckpt_prune.common import memory
from ckpt_prune.job import timing as module
from ckpt_prune.job.timing import PhaseTimer


def test_time_is_that_of_the_body(monkeypatch):
    ticks = iter([10.0, 12.5, 20.0, 20.25])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=ticks.__next__))
    timer = PhaseTimer(torch.device("cpu"))
    with timer.time("first"):
        pass
    with timer.time("second"):
        pass
    assert [(stage.name, stage.seconds) for stage in timer.records] == [("first", 2.5), ("second", 0.25)]


def test_memory_is_the_largest_so_far():
    if memory.peak_bytes() is None:
        pytest.skip("the system does not say")
    timer = PhaseTimer(torch.device("cpu"))
    with timer.time("before"):
        pass
    start = memory.resident_bytes()
    assert start is not None
    with timer.time("large"):
        large = torch.ones(64 << 20)  # 256 MiB, every page touched
        del large
    with timer.time("after"):
        pass
    before, during, after = (stage.peak_bytes for stage in timer.records)
    assert before is not None
    assert during is not None
    assert after is not None
    assert during >= max(before, start + (250 << 20))
    assert after >= during
    assert all(stage.device_peak_bytes is None for stage in timer.records)


def test_an_accelerator_is_awaited_and_counted_anew_for_each_stage(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(("reset", device.type)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("awaited", device.type)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    timer = PhaseTimer(torch.device("cuda"))
    with timer.time("first"):
        calls.append("body")
    assert calls == [("reset", "cuda"), "body", ("awaited", "cuda")]
    assert [stage.device_peak_bytes for stage in timer.records] == [123]
