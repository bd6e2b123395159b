"""From raw timings to the figures that are shown."""

from collections.abc import Mapping, Sequence
from math import floor
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ckpt_prune.benchmarking.costs import Costs
from ckpt_prune.benchmarking.messages import Phase, Runtime, Seat, Timing
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.common.graph_types import GraphType

Label = Literal["A", "B"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Row(_Frozen):
    """One model in one runtime on one workload.

    Attributes:
        p50_ms, p95_ms: percentiles of all timings.
        throughput: tokens or images per second, at the median.
        p50_ratio: of p50 to that of A in the same runtime, packed weights apart; None where A was not timed in it.
        flops: of what is timed once: the batch, or one step of decode, the mean over the steps.
        flops_ratio: to those of A.
        latencies_ms: for every round its timings, one, or in decode one per step.
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


class Block(_Frozen):
    """One phase of one workload.

    Attributes:
        tokens: of each text; None of images.
        steps: tokens generated after it.
        unit: of throughput, per second.
    """

    phase: Phase
    batch: int
    tokens: int | None
    steps: int
    unit: Literal["tokens", "images"]
    rows: list[Row]


class Run(_Frozen):
    """One model in one runtime: size and memory.

    Attributes:
        device: of torch's, or onnxruntime's provider.
        dtype: fp32 or fp16; of graphs also int8, int4 or q4f16.
        optimize: provider that a graph is fused for, or none; None in PyTorch.
        parameters: None of a graph without its checkpoint.
        disk_bytes: of the checkpoint's weights, or of the graph with its external data.
        base_bytes: resident in the process before the model was loaded; None where the system does not say.
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


class Machine(_Frozen):
    """What it was measured on.

    Attributes:
        processor: name of the CPU.
        gpu: name of the GPU, where one was used.
        cores: that this process may run on.
        threads: of each model.
        versions: of what computed.
    """

    processor: str
    gpu: str | None
    cores: int
    threads: int
    versions: dict[str, str]


class Result(_Frozen):
    """Everything that was measured."""

    version: Literal[1] = 1
    machine: Machine
    rounds: int
    warmup: int
    seed: int
    runs: list[Run]
    blocks: list[Block]

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """What is worth a glance."""
        return [
            ("processor", self.machine.processor),
            ("gpu", self.machine.gpu),
            ("rounds", self.rounds),
            ("runs", [f"{own.label}: {own.model} in {own.runtime}" for own in self.runs]),
            ("blocks", len(self.blocks)),
        ]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of the values are below, linear between neighbours, as numpy has it.

    >>> percentile([4.0, 1.0, 2.0], 50)
    2.0
    """
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def blocks_of(
    workload: Workload, seats: Sequence[Seat], timings: Sequence[Sequence[Timing]], costs: Mapping[Label, Costs | None]
) -> list[Block]:
    """The figures of one workload, a block per phase.

    Args:
        workload: that was timed.
        seats: what was timed.
        timings: of each of them, round by round.
        costs: of A and of B; None where they are not known.
    """
    return [
        Block(
            phase=phase,
            batch=workload.batch,
            tokens=workload.tokens if workload.modality == "text" else None,
            steps=workload.steps,
            unit="tokens" if workload.modality == "text" else "images",
            rows=_rows(workload, phase, seats, [[each[phase] for each in rounds] for rounds in timings], costs),
        )
        for phase in workload.phases
    ]


def _rows(
    workload: Workload,
    phase: Phase,
    seats: Sequence[Seat],
    latencies: Sequence[Sequence[Sequence[float]]],
    costs: Mapping[Label, Costs | None],
) -> list[Row]:
    flat = [[second for timed in rounds for second in timed] for rounds in latencies]
    medians = [percentile(seconds, 50) for seconds in flat]
    dense = {seat.runtime: median for seat, median in zip(seats, medians, strict=True) if seat.label == "A"}
    flops = {label: known.flops(workload, phase) if known else None for label, known in costs.items()}
    return [
        Row(
            label=seat.label,
            model=seat.model,
            runtime=seat.runtime,
            p50_ms=1e3 * median,
            p95_ms=1e3 * percentile(seconds, 95),
            throughput=workload.items(phase) / median,
            p50_ratio=median / dense[_base(seat.runtime)] if _base(seat.runtime) in dense else None,
            flops=flops[seat.label],
            flops_ratio=_ratio(flops[seat.label], flops["A"]),
            latencies_ms=[[1e3 * second for second in timed] for timed in rounds],
        )
        for seat, rounds, seconds, median in zip(seats, latencies, flat, medians, strict=True)
    ]


def _base(runtime: Runtime) -> Runtime:
    return "PyTorch" if runtime == "PyTorch 2:4" else runtime


def _ratio(one: int | None, other: int | None) -> float | None:
    return one / other if one is not None and other else None
