"""Which type `--compute-dtype auto` is."""

from typing import Any

import pytest
import torch

from ckpt_prune.api.commands import calibrate, prune
from ckpt_prune.demo.run import model_folder
from ckpt_prune.parallel.devices import resolve_compute_dtype
from ckpt_prune.parallel.devices import time_products as timed_products

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


TIMES = "ckpt_prune.parallel.devices.time_products"
FAST, SLOW = (4.0, 1.0), (1.0, 0.9)
"""Seconds of a product in float32 and in bfloat16."""


@pytest.mark.parametrize(("times", "stored"), [(FAST, BRAIN), (FAST, SINGLE), (FAST, HALF), (SLOW, BRAIN)])
def test_auto_on_a_processor(monkeypatch, times, stored):
    monkeypatch.setattr(TIMES, lambda: times)
    assert resolve_compute_dtype("auto", CPU, stored) == (BRAIN if times == FAST and stored == BRAIN else SINGLE)
    assert resolve_compute_dtype("auto", CPU) == SINGLE


@pytest.mark.parametrize(("has", "expected"), [(True, BRAIN), (False, SINGLE)])
def test_auto_on_a_gpu(monkeypatch, has, expected):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: has or including_emulation)
    assert resolve_compute_dtype("auto", CUDA, BRAIN) == expected


def test_commands_take_it(monkeypatch, tmp_path):
    monkeypatch.setattr(TIMES, lambda: FAST)
    (tmp_path / "text.txt").write_text("It is a model of texts such as this one. " * 20)
    how: dict[str, Any] = {"text": [tmp_path / "text.txt"], "samples": 2, "window": 16}
    statistics = calibrate(model_folder(), output=tmp_path / "statistics", collect="moments", **how)
    assert statistics.index.compute_dtype == "bfloat16"
    outputs = []
    for number, dtype in enumerate(("auto", "bfloat16", "float32")):
        out = tmp_path / str(number)
        prune(model_folder(), recipe="wanda-sp", ratio=0.5, output=out, compute_dtype=dtype, **how)
        outputs.append([path.read_bytes() for path in sorted(out.glob("*.safetensors"))])
    assert outputs[0] == outputs[1] != outputs[2]


def test_products_are_timed_once_for_a_machine(monkeypatch, tmp_path):
    """Two measurements on a busy machine can differ, and a resumed run must compute as it began."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    turns = iter([FAST, SLOW])
    monkeypatch.setattr("ckpt_prune.parallel.devices._time_products", lambda: next(turns))
    time_products = timed_products.__wrapped__
    assert time_products() == time_products() == FAST
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert time_products() == SLOW
    (kept, *_) = tmp_path.rglob("*.json")
    kept.write_text("damaged")
    monkeypatch.setattr("ckpt_prune.parallel.devices._time_products", lambda: FAST)
    assert {time_products() for _ in range(2)} <= {FAST, SLOW}
