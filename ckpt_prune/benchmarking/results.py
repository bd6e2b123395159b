"""From raw timings to the figures that are shown."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ckpt_prune.benchmarking.models import Costs
from ckpt_prune.benchmarking.participants import Label, Participant, Phase, Runtime, Timing
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.common.fields import Frozen
from ckpt_prune.common.graph_types import GraphType


class BenchmarkRow(Frozen):
    """One model in one runtime on one workload.

    Attributes:
        p50_ms, p95_ms: percentiles of all timings.
        throughput: tokens or images per second, at the median.
        p50_ratio: of p50 to that of A in the same runtime (2:4 kernels, and without turns: in PyTorch); None if A was
            not timed in it.
        flops: of one timing: the batch, or in decode the mean step; None of a block.
        flops_ratio: to those of A.
        latencies_ms: timings by round: one, in decode one per step, and of blocks one for each.
    """

    label: Label
    model: str
    runtime: Runtime
    p50_ms: float
    p95_ms: float
    throughput: float
    p50_ratio: float | None
    flops: int | None
    flops_ratio: float | None
    latencies_ms: list[list[float]]


class Block(Frozen):
    """One phase of one workload: `tokens` of each text (None of images), and `steps` generated after it."""

    phase: Phase
    batch: int
    tokens: int | None
    steps: int
    unit: Literal["tokens", "images"]
    rows: list[BenchmarkRow]


class TimedModel(Frozen):
    """One model in one runtime: size and memory in bytes.

    Attributes:
        device: torch's, or onnxruntime's provider.
        optimize: provider that a graph is fused for, or none; None in PyTorch.
        parameters: None of a graph without its checkpoint.
        disk_bytes: of the checkpoint's weights, or of the graph with its external data.
        base_bytes: resident before the model was loaded; None if the system does not say.
        peak_bytes: largest resident size of the process, the base included.
        gpu_bytes: most that PyTorch had allocated on the GPU; None elsewhere.
    """

    label: Label
    model: str
    runtime: Runtime
    device: str
    dtype: GraphType
    optimize: str | None
    parameters: int | None
    disk_bytes: int
    base_bytes: int | None
    peak_bytes: int | None
    gpu_bytes: int | None


class Machine(Frozen):
    """The machine: `cores` are those that this process may use, `threads` those of each model."""

    processor: str
    gpu: str | None
    cores: int
    threads: int
    versions: dict[str, str]


class Benchmark(Frozen):
    """Everything that was measured."""

    version: Literal[1] = 1
    machine: Machine
    rounds: int
    warmup: int
    seed: int
    runs: list[TimedModel]
    blocks: list[Block]

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [
            ("processor", self.machine.processor),
            ("gpu", self.machine.gpu),
            ("rounds", self.rounds),
            ("runs", [f"{run.label}: {run.model} in {run.runtime}" for run in self.runs]),
            ("blocks", len(self.blocks)),
        ]


def make_blocks(
    workload: Workload,
    participants: Sequence[Participant],
    timings: Sequence[Sequence[Timing]],
    costs: Mapping[Label, Costs | None],
) -> list[Block]:
    """Return the figures of one workload, a block per phase.

    Args:
        timings: of each participant, by round.
        costs: of A and of B; None if they are not known.
    """
    phases = dict.fromkeys(phase for timing in timings for phase in timing[0])
    timed = {phase: [place for place, timing in enumerate(timings) if phase in timing[0]] for phase in phases}
    return [
        Block(
            phase=phase,
            batch=workload.batch,
            tokens=workload.tokens if workload.modality == "text" else None,
            steps=workload.steps,
            unit="tokens" if workload.modality == "text" else "images",
            rows=_make_rows(
                workload,
                phase,
                [participants[place] for place in places],
                [[each[phase] for each in timings[place]] for place in places],
                {label: None if phase == "block" else cost for label, cost in costs.items()},
            ),
        )
        for phase, places in timed.items()
    ]


def _make_rows(
    workload: Workload,
    phase: Phase,
    participants: Sequence[Participant],
    latencies: Sequence[Sequence[Sequence[float]]],
    costs: Mapping[Label, Costs | None],
) -> list[BenchmarkRow]:
    seconds = [[second for timing in rounds for second in timing] for rounds in latencies]
    medians = [float(np.percentile(each, 50)) for each in seconds]
    dense = {each.runtime: median for each, median in zip(participants, medians, strict=True) if each.label == "A"}
    flops = {label: cost.flops(workload, phase) if cost else None for label, cost in costs.items()}
    rows = []
    for tried, rounds, each, median in zip(participants, latencies, seconds, medians, strict=True):
        base: Runtime = "PyTorch" if tried.runtime.startswith("PyTorch") else tried.runtime
        count, dense_count = flops[tried.label], flops["A"]
        rows.append(
            BenchmarkRow(
                label=tried.label,
                model=tried.model,
                runtime=tried.runtime,
                p50_ms=1e3 * median,
                p95_ms=1e3 * float(np.percentile(each, 95)),
                throughput=workload.count_items(phase) / median,
                p50_ratio=median / dense[base] if base in dense else None,
                flops=count,
                flops_ratio=count / dense_count if count is not None and dense_count else None,
                latencies_ms=[[1e3 * second for second in timing] for timing in rounds],
            )
        )
    return rows
