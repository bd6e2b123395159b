"""Figures from raw timings, against sums done by hand."""

import numpy as np
import pytest

from ckpt_prune.benchmarking.models import Costs
from ckpt_prune.benchmarking.participants import Participant
from ckpt_prune.benchmarking.results import make_blocks
from ckpt_prune.benchmarking.workload import Workload


def participant(label: str, runtime: str = "PyTorch") -> Participant:
    return Participant(label, label.lower(), runtime, label, "cpu", 1, "fp32")


def text(steps: int, batch: int = 2) -> Workload:
    return Workload("text", batch, 10, steps, True, True, 40, (0, 0, 0))


def test_prefill_and_decode():
    """Two rounds of 20 tokens, and of two steps of 2 tokens."""
    timings = [
        [{"prefill": [0.1], "decode": [0.01, 0.02]}, {"prefill": [0.3], "decode": [0.03, 0.08]}],
        [{"prefill": [0.1], "decode": [0.01, 0.01]}, {"prefill": [0.1], "decode": [0.01, 0.01]}],
    ]
    costs = {"A": Costs(7, once=0, per_token=10, per_pair=4), "B": Costs(5, once=0, per_token=5, per_pair=2)}
    prefill, decode = make_blocks(text(2), [participant("A"), participant("B")], timings, costs)
    assert (prefill.phase, prefill.batch, prefill.tokens, prefill.steps, prefill.unit) == (
        "prefill",
        2,
        10,
        2,
        "tokens",
    )
    a, b = prefill.rows
    assert (a.label, a.model, a.runtime) == ("A", "a", "PyTorch")
    assert (a.p50_ms, a.p95_ms, a.throughput) == pytest.approx((200, 290, 20 / 0.2))
    assert (a.p50_ratio, a.flops_ratio) == (1, 1)
    assert a.latencies_ms == [[100], [300]]
    assert (b.p50_ratio, b.flops_ratio) == (0.5, 0.5)
    assert a.flops == 2 * (10 * 10 + 4 * 10 * 10)
    a, b = decode.rows
    assert decode.phase == "decode"
    # 2 tokens in a step.
    assert (a.p50_ms, a.p95_ms, a.throughput) == pytest.approx((25, 72.5, 2 / 0.025))
    assert np.array(a.latencies_ms) == pytest.approx(np.array([[10, 20], [30, 80]]))
    assert b.p50_ratio == pytest.approx(10 / 25)
    # The queries of the two steps look at 11 and at 12 keys: 46 on average, by 4.
    assert a.flops == 2 * (10 + 4 * 23 // 2)


def test_blocks_are_of_those_that_were_timed_by_the_block():
    participants = [participant("A"), participant("B", "PyTorch 2:4, unturned"), participant("A", "onnxruntime")]
    timings = [
        [{"forward": [1.0], "block": [0.2, 0.4]}],
        [{"forward": [1.0], "block": [0.1, 0.2]}],
        [{"forward": [2.0]}],
    ]
    costs = {"A": Costs(7, 0, 10, 4), "B": Costs(5, 0, 5, 2)}
    forward, block = make_blocks(text(0), participants, timings, costs)
    assert [row.runtime for row in forward.rows] == ["PyTorch", "PyTorch 2:4, unturned", "onnxruntime"]
    assert [(row.p50_ms, row.p50_ratio) for row in block.rows] == [
        (pytest.approx(300), 1),
        (pytest.approx(150), pytest.approx(0.5)),
    ]
    assert [(row.flops, row.flops_ratio, row.latencies_ms) for row in block.rows] == [
        (None, None, [[pytest.approx(200), pytest.approx(400)]]),
        (None, None, [[pytest.approx(100), pytest.approx(200)]]),
    ]


def test_ratios_are_to_a_in_the_same_runtime():
    participants = [
        participant("A"),
        participant("B"),
        participant("A", "onnxruntime"),
        participant("B", "onnxruntime"),
    ]
    timings = [[{"prefill": [seconds]}] for seconds in (1.0, 0.5, 0.25, 0.2)]
    (block,) = make_blocks(text(0), participants, timings, {"A": None, "B": Costs(5, 0, 5, 2)})
    assert [row.p50_ratio for row in block.rows] == pytest.approx([1, 0.5, 1, 0.8])
    # Without the FLOPs of A there is nothing to compare with.
    assert [row.flops for row in block.rows] == [None, 500, None, 500]
    assert {row.flops_ratio for row in block.rows} == {None}


def test_packed_weights_are_compared_with_those_that_are_not():
    participants = [
        participant("A"),
        participant("B"),
        participant("B", "PyTorch 2:4"),
        participant("B", "onnxruntime"),
    ]
    timings = [[{"prefill": [seconds]}] for seconds in (1.0, 0.8, 0.5, 0.4)]
    (block,) = make_blocks(text(0), participants, timings, {"A": None, "B": None})
    assert [row.p50_ratio for row in block.rows] == [1, 0.8, 0.5, None]  # A was not timed in onnxruntime
