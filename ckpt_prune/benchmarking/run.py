"""The benchmark: two models, in one runtime or two, timed in turns."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from time import sleep
from typing import Literal, Protocol

import torch

from ckpt_prune.benchmarking.costs import Costs, costs_of, weights_bytes
from ckpt_prune.benchmarking.entrants import Entrant, GraphWish, Say, open_entrant, with_graph
from ckpt_prune.benchmarking.figures import Label, Machine, Result, Run, blocks_of
from ckpt_prune.benchmarking.messages import Memory, Ready, Seat, Timing
from ckpt_prune.benchmarking.pool import workers
from ckpt_prune.benchmarking.two_four import why_not
from ckpt_prune.benchmarking.workload import SEED, Workload, choose_workloads
from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import EXPORT_ERROR
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.common.progress import meter
from ckpt_prune.onnx.folder import graph_bytes
from ckpt_prune.onnx.manifest import runtime_versions
from ckpt_prune.onnx.session import FILES
from ckpt_prune.options import SpreadOptions

REST = 0.05
"""Seconds between two turns: threads of onnxruntime look for more work before they sleep, on a core that the next model
needs (measured with two threads on two cores: one small model took 16.0 ms behind a graph, and 13.8 behind PyTorch)."""


@dataclass(frozen=True)
class Settings:
    """How two models are compared."""

    onnx: bool = False
    """Also in onnxruntime; exported folders run in nothing else."""
    batches: tuple[int, ...] = (1,)
    tokens: int | None = None
    """The tokens of a text; None for 128, or what the context has room for."""
    steps: int | None = None
    """Generated after the text; None for 16, or half the context where that is less, where both models can."""
    rounds: int = 30
    warmup: int = 3
    """Rounds that are run before and not counted."""
    threads: int | None = None
    """The threads of each model; None for as many as torch takes."""
    device: str = "cpu"
    """The device of PyTorch."""
    provider: Literal["cpu", "cuda"] | None = None
    """The provider of onnxruntime; None for CUDA where PyTorch's device is one, else the CPU."""
    optimize: Literal["none", "cpu", "cuda"] | None = None
    """What graphs are fused for; None for graphs as they are found, or made without."""
    dtype: GraphType | None = None
    """The type of graphs; None for fp32, and for graphs as they are found. PyTorch computes in fp16 where that is."""
    two_four: bool = False
    """Also by torch's kernels for 2:4, where that can be."""
    trust: bool = False
    """Run the code that a checkpoint brings, where it is not this tool's."""
    spread: SpreadOptions = field(default_factory=lambda: SpreadOptions.model_validate({}))
    """Over which devices a model in PyTorch is spread."""


class Timed(Protocol):
    """What can be told to run a workload once."""

    def time(self, workload: Workload) -> Timing:
        """Run it, and say how long it took."""


def compare(a: str, b: str, settings: Settings, say: Say) -> Result:
    """Time two models in turns.

    Both are loaded WHOLE, a process for each model and runtime, and stay in memory together.

    Args:
        a: the reference, usually dense: a folder or a Hub id of a checkpoint, or an exported folder.
        b: what is compared with it.
        settings: how.
        say: is told in a line what takes long and what is not as asked for.

    Raises:
        UserError: the two cannot be compared, cannot be loaded or exported, or a process dies.
    """
    wish = GraphWish(settings.optimize, settings.dtype)
    pair = [
        open_entrant("A", a, wish, say, onnx=settings.onnx),
        open_entrant("B", b, wish, say, onnx=settings.onnx),
    ]
    onnx = _in_onnxruntime(pair, settings)
    jobs = choose_workloads(
        [each.reads(trust=settings.trust) for each in pair],
        [a, b],
        batches=settings.batches,
        tokens=settings.tokens,
        steps=settings.steps,
    )
    costs: dict[Label, Costs | None] = {
        each.label: costs_of(each.checkpoint) if each.checkpoint is not None else None for each in pair
    }
    threads = settings.threads or torch.get_num_threads()
    with scratch_folder(keeps=EXPORT_ERROR) as scratch:
        if onnx:
            pair = [with_graph(each, wish, scratch, say, trust=settings.trust) for each in pair]
            _say_differences(pair, say)
        seats = _seats(pair, settings, threads, onnx)
        if settings.two_four:
            seats += _packed(pair, seats, settings, say)
        with workers(seats) as pool:
            ready = [worker.ready() for worker in pool]
            for seat, loaded in zip(seats, ready, strict=True):
                if loaded.note:
                    say(f"{seat}: {loaded.note}")
            blocks, done = [], count(1)
            with meter((settings.warmup + settings.rounds) * len(jobs), "timing", unit="round") as bar:
                for job in jobs:
                    timings = take_turns(
                        pool,
                        job,
                        rounds=settings.rounds,
                        warmup=settings.warmup,
                        tick=lambda: bar.to(next(done)),
                        rest=REST,
                    )
                    blocks += blocks_of(job, seats, timings, costs)
            memory = [worker.finish() for worker in pool]
        runs = [_run(*each, pair, costs) for each in zip(seats, ready, memory, strict=True)]
    return Result(
        machine=_machine(threads, [each.device for each in ready]),
        rounds=settings.rounds,
        warmup=settings.warmup,
        seed=SEED,
        runs=runs,
        blocks=blocks,
    )


def take_turns(
    timed: Sequence[Timed],
    workload: Workload,
    *,
    rounds: int,
    warmup: int,
    tick: Callable[[], None],
    rest: float = 0.0,
) -> list[list[Timing]]:
    """Time a workload in rounds of each of them once; a round starts with the second of the round before.

    What slows the machine down for a while slows them all down alike.

    Args:
        timed: what is timed.
        workload: one of them.
        rounds: that are counted.
        warmup: rounds before them.
        tick: is called after every round.
        rest: seconds between turns.

    Returns:
        The timings of each, round by round.
    """
    found: list[list[Timing]] = [[] for _ in timed]
    for number in range(warmup + rounds):
        for turn in range(len(timed)):
            index = (number + turn) % len(timed)
            sleep(rest)
            timing = timed[index].time(workload)
            if number >= warmup:
                found[index].append(timing)
        tick()
    return found


def _in_onnxruntime(pair: Sequence[Entrant], settings: Settings) -> bool:
    """Whether graphs are timed: where asked for, or where there is nothing else."""
    graphs = [each.name for each in pair if each.checkpoint is None]
    if settings.onnx or len(graphs) == len(pair):
        return True
    if graphs:
        raise UserError(
            f"{graphs[0]} is an exported graph, which runs in onnxruntime alone: say --onnx to time both there"
        )
    for option, value in (("--provider", settings.provider), ("--optimize", settings.optimize)):
        if value is not None:
            raise UserError(f"{option} is for onnxruntime: say --onnx as well")
    return False


def _say_differences(pair: Sequence[Entrant], say: Say) -> None:
    a, b = (each.manifest for each in pair)
    assert a is not None
    assert b is not None
    for what, one, other in (("dtype", a.dtype, b.dtype), ("optimize", a.optimize, b.optimize)):
        if one != other:
            say(f"the graphs were made with --{what} {one} and {other}: their ratio is not of pruning alone")


def _seats(pair: Sequence[Entrant], settings: Settings, threads: int, onnx: bool) -> list[Seat]:
    seats = [
        Seat(
            each.label,
            each.name,
            "PyTorch",
            str(each.folder),
            settings.device,
            threads,
            "fp16" if settings.dtype == "fp16" else "fp32",
            settings.trust,
            settings.spread,
        )
        for each in pair
        if each.checkpoint is not None
    ]
    if onnx:
        # The same GPU, where both are on one.
        kind = torch.device(settings.device).type
        device = settings.device if settings.provider in (None, kind) else settings.provider
        seats += [
            Seat(each.label, each.name, "onnxruntime", str(each.graph), device, threads, each.manifest.dtype)
            for each in pair
            if each.manifest is not None
        ]
    return seats


def _packed(pair: Sequence[Entrant], seats: Sequence[Seat], settings: Settings, say: Say) -> list[Seat]:
    """Those of PyTorch once more, with packed weights; what cannot be is said."""
    found = []
    for each in pair:
        if each.checkpoint is None:
            continue
        if (reason := why_not(each.checkpoint, settings.device, settings.dtype)) is not None:
            say(f"{each.name} is not timed with 2:4: {reason}")
            continue
        own = next(seat for seat in seats if seat.label == each.label and seat.runtime == "PyTorch")
        found.append(replace(own, runtime="PyTorch 2:4"))
    return found


def _run(seat: Seat, ready: Ready, memory: Memory, pair: Sequence[Entrant], costs: dict[Label, Costs | None]) -> Run:
    entrant = next(each for each in pair if each.label == seat.label)
    graph = seat.runtime == "onnxruntime"
    known = costs[seat.label]
    parameters = None
    if known is not None:
        parameters = known.parameters
    elif entrant.checkpoint is not None:
        parameters = sum(info.numel for info in entrant.checkpoint.tensors.values())
    disk = graph_bytes(Path(seat.folder), FILES[seat.dtype])
    if not graph and entrant.checkpoint is not None:
        disk = weights_bytes(entrant.checkpoint)
    return Run(
        label=seat.label,
        model=seat.model,
        runtime=seat.runtime,
        device=ready.device,
        dtype=seat.dtype,
        optimize=entrant.manifest.optimize if graph and entrant.manifest else None,
        parameters=parameters,
        disk_bytes=disk,
        base_bytes=memory.base,
        peak_bytes=memory.peak,
        gpu_bytes=memory.gpu,
    )


def _machine(threads: int, devices: Sequence[str]) -> Machine:
    gpus = [torch.device(each) for each in devices if each != "cpu" and torch.cuda.is_available()]
    return Machine(
        processor=processor_name(),
        gpu=torch.cuda.get_device_name(gpus[0].index or 0) if gpus else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=threads,
        versions=runtime_versions(),
    )


def processor_name() -> str:
    """The CPU's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
