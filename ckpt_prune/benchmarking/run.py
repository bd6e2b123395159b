"""The benchmark: two models, in one runtime or two, timed in turns."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import sleep
from typing import Protocol

import torch

from ckpt_prune.benchmarking.models import BenchmarkModel, Costs, Say, add_graph, count_costs, open_model
from ckpt_prune.benchmarking.participants import Label, Loaded, Memory, Participant, Timing
from ckpt_prune.benchmarking.processes import start_workers
from ckpt_prune.benchmarking.results import Benchmark, Machine, TimedModel, make_blocks
from ckpt_prune.benchmarking.runners import why_not_two_four
from ckpt_prune.benchmarking.workload import SEED, Workload, choose_workloads, read_model_inputs
from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import EXPORT_ERROR
from ckpt_prune.common.graph_types import GRAPH_FILES, GraphType
from ckpt_prune.common.machine import processor_name
from ckpt_prune.common.progress import meter
from ckpt_prune.onnx.export import count_graph_bytes
from ckpt_prune.onnx.records import runtime_versions
from ckpt_prune.options.commands import BenchmarkOptions
from ckpt_prune.options.machine import SpreadOptions
from ckpt_prune.parallel.devices import resolve_device

PAUSE = 0.05
"""Seconds between two turns: threads of onnxruntime look for more work before they sleep, on a core that the next model
needs (measured with two threads on two cores: one small model took 16.0 ms behind a graph, and 13.8 behind PyTorch)."""


def compare(options: BenchmarkOptions, batches: Sequence[int], spread: SpreadOptions, say: Say) -> Benchmark:
    """Time two models in turns.

    Both are loaded WHOLE, a process for each model and runtime, and stay in memory together.

    Args:
        options: the two models, and how they are timed.
        spread: over which devices a model in PyTorch is spread.
        say: takes a line about what takes long and what is not as asked for.
    """
    models = [open_model("A", options.a, options, say), open_model("B", options.b, options, say)]
    uses_onnx = _uses_onnxruntime(models, options)
    trust = options.trust_remote_code
    workloads = choose_workloads(
        [read_model_inputs(model.folder, model.manifest, trust=trust) for model in models],
        [options.a, options.b],
        batches=batches,
        tokens=options.tokens,
        steps=options.generate,
    )
    costs = {model.label: None if model.checkpoint is None else count_costs(model.checkpoint) for model in models}
    threads = options.threads or torch.get_num_threads()
    with scratch_folder(keeps=EXPORT_ERROR) as scratch:
        if uses_onnx:
            models = [add_graph(model, options, scratch, say) for model in models]
            _warn_of_differences(models, say)
        participants = _list_participants(models, options, spread, threads, uses_onnx, say)
        with start_workers(participants) as workers:
            loaded = [worker.wait_until_loaded() for worker in workers]
            for participant, place in zip(participants, loaded, strict=True):
                if place.note:
                    say(f"{participant}: {place.note}")
            blocks, rounds = [], count(1)
            with meter((options.warmup + options.rounds) * len(workloads), "timing", unit="round") as bar:
                for workload in workloads:
                    timings = take_turns(
                        workers,
                        workload,
                        rounds=options.rounds,
                        warmup=options.warmup,
                        tick=lambda: bar.to(next(rounds)),
                        pause=PAUSE,
                    )
                    blocks += make_blocks(workload, participants, timings, costs)
            memory = [worker.finish() for worker in workers]
        runs = [_describe_run(*each, models, costs) for each in zip(participants, loaded, memory, strict=True)]
    return Benchmark(
        machine=_describe_machine(threads, [each.device for each in loaded]),
        rounds=options.rounds,
        warmup=options.warmup,
        seed=SEED,
        runs=runs,
        blocks=blocks,
    )


class Timer(Protocol):
    """Something that runs a workload once."""

    def time(self, workload: Workload) -> Timing: ...


def take_turns(
    timed: Sequence[Timer],
    workload: Workload,
    *,
    rounds: int,
    warmup: int,
    tick: Callable[[], None],
    pause: float = 0.0,
) -> list[list[Timing]]:
    """Time a workload in rounds of each of them once; a round starts with the second of the round before.

    Work that slows the machine down for a while slows them all down alike.

    Args:
        rounds: that are counted.
        warmup: rounds before them.
        tick: is called after every round.
        pause: seconds before each turn.

    Returns:
        The timings of each, by round.
    """
    timings: list[list[Timing]] = [[] for _ in timed]
    for number in range(warmup + rounds):
        for turn in range(len(timed)):
            index = (number + turn) % len(timed)
            sleep(pause)
            timing = timed[index].time(workload)
            if number >= warmup:
                timings[index].append(timing)
        tick()
    return timings


def _uses_onnxruntime(models: Sequence[BenchmarkModel], options: BenchmarkOptions) -> bool:
    graphs = [model.name for model in models if model.checkpoint is None]
    if options.blocks and len(graphs) == len(models):
        raise UserError(f"--blocks times blocks in PyTorch, and {graphs[0]} is an exported graph")
    if options.onnx or len(graphs) == len(models):
        return True
    if graphs:
        raise UserError(
            f"{graphs[0]} is an exported graph, which runs in onnxruntime alone: say --onnx to time both there"
        )
    for option, value in (("--provider", options.provider), ("--optimize", options.optimize)):
        if value is not None:
            raise UserError(f"{option} is for onnxruntime: say --onnx as well")
    return False


def _warn_of_differences(models: Sequence[BenchmarkModel], say: Say) -> None:
    a, b = (model.manifest for model in models)
    assert a is not None
    assert b is not None
    for what, one, other in (("dtype", a.dtype, b.dtype), ("optimize", a.optimize, b.optimize)):
        if one != other:
            say(f"the graphs were made with --{what} {one} and {other}: their ratio is not that of pruning alone")


def _list_participants(
    models: Sequence[BenchmarkModel],
    options: BenchmarkOptions,
    spread: SpreadOptions,
    threads: int,
    uses_onnx: bool,
    say: Say,
) -> list[Participant]:
    device = str(resolve_device(options.device))
    dtype: GraphType = "fp16" if options.dtype == "fp16" else "fp32"
    in_torch, in_onnx, packed = [], [], []
    # Both runtimes use the same GPU, if both are on one.
    kind = torch.device(device).type
    graph_device = device if options.provider in (None, kind) else options.provider
    for model in models:
        name = (model.label, model.name)
        if model.checkpoint is not None:
            participant = Participant(
                *name,
                "PyTorch",
                str(model.folder),
                device,
                threads,
                dtype,
                options.trust_remote_code,
                options.blocks,
                spread,
            )
            turns = options.blocks and bool(model.checkpoint.config.get("ckpt_prune_rotations"))
            in_torch += [participant, replace(participant, runtime="PyTorch, unturned")][: 1 + turns]
            if options.two_four:
                if (reason := why_not_two_four(model.checkpoint, device, options.dtype)) is None:
                    packed.append(replace(participant, runtime="PyTorch 2:4"))
                    packed += [replace(participant, runtime="PyTorch 2:4, unturned")] * turns
                else:
                    say(f"{model.name} is not timed with 2:4: {reason}")
        if uses_onnx and model.manifest is not None:
            graph = str(model.graph)
            in_onnx.append(Participant(*name, "onnxruntime", graph, graph_device, threads, model.manifest.dtype))
    return in_torch + in_onnx + packed


def _describe_run(
    participant: Participant,
    loaded: Loaded,
    memory: Memory,
    models: Sequence[BenchmarkModel],
    costs: dict[Label, Costs | None],
) -> TimedModel:
    model = next(each for each in models if each.label == participant.label)
    is_graph = participant.runtime == "onnxruntime"
    checkpoint, cost = model.checkpoint, costs[participant.label]
    parameters = None if cost is None else cost.parameters
    if cost is None and checkpoint is not None:
        parameters = sum(info.numel for info in checkpoint.tensors.values())
    if is_graph or checkpoint is None:
        disk = count_graph_bytes(Path(participant.folder), GRAPH_FILES[participant.dtype])
    else:
        disk = sum((checkpoint.path / name).stat().st_size for name in checkpoint.files)
    return TimedModel(
        label=participant.label,
        model=participant.model,
        runtime=participant.runtime,
        device=loaded.device,
        dtype=participant.dtype,
        optimize=model.manifest.optimize if is_graph and model.manifest else None,
        parameters=parameters,
        disk_bytes=disk,
        base_bytes=memory.base,
        peak_bytes=memory.peak,
        gpu_bytes=memory.gpu,
    )


def _describe_machine(threads: int, devices: Sequence[str]) -> Machine:
    gpus = [torch.device(device) for device in devices if device != "cpu" and torch.cuda.is_available()]
    return Machine(
        processor=processor_name(),
        gpu=torch.cuda.get_device_name(gpus[0].index or 0) if gpus else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=threads,
        versions=runtime_versions(),
    )
