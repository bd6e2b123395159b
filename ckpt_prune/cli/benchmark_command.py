"""`ckpt-prune benchmark`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import benchmark
from ckpt_prune.cli.command import Command, figure, table_of

if TYPE_CHECKING:
    from ckpt_prune.benchmarking.results import Benchmark, Block, TimedModel


def _show(result: "Benchmark", _options: dict[str, Any]) -> None:
    from ckpt_prune.common.formatting import plural

    machine = result.machine
    where = [machine.processor, plural(machine.cores, "core"), f"{plural(machine.threads, 'thread')} a model"]
    rounds = f"{plural(result.rounds, 'round')} after {result.warmup} of warm-up"
    used = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    names = {run.label: run.model for run in result.runs}
    parts = [
        "\n".join(f"{label}  {name}" for label, name in sorted(names.items())),
        "\n".join([", ".join(where + ([machine.gpu] if machine.gpu else [])), used, rounds]),
        _runs(result.runs),
        *(_block(block) for block in result.blocks),
    ]
    click.echo("\n\n".join(parts))


def _runs(runs: "list[TimedModel]") -> str:
    from ckpt_prune.common.formatting import human_bytes, human_count

    def size(count: int | None) -> str:
        return "-" if count is None else human_bytes(count)

    has_gpu = any(run.gpu_bytes is not None for run in runs)
    rows = []
    for run in runs:
        fused = "" if run.optimize in (None, "none") else f", fused for {run.optimize}"
        row = {
            "": run.label,
            "runtime": run.runtime,
            "on": run.device,
            "type": run.dtype + fused,
            "parameters": "-" if run.parameters is None else human_count(run.parameters),
            "on disk": size(run.disk_bytes),
            "base memory": size(run.base_bytes),
            "peak memory": size(run.peak_bytes),
        }
        rows.append(row | ({"GPU memory": size(run.gpu_bytes)} if has_gpu else {}))
    return table_of(rows)


def _block(block: "Block") -> str:
    from ckpt_prune.common.formatting import human_count

    if block.phase == "decode":
        what = f"decode, one of {block.steps} tokens after {block.tokens}"
    elif block.phase == "block":
        what = "a block" if block.tokens is None else f"a block on {block.tokens} tokens"
    else:
        what = "forward" if block.tokens is None else f"{block.phase} of {block.tokens} tokens"
    rows = [
        {
            "": row.label,
            "runtime": row.runtime,
            "p50 ms": f"{row.p50_ms:.2f}",
            "p95 ms": f"{row.p95_ms:.2f}",
            f"{block.unit}/s": f"{row.throughput:,.1f}",
            "p50 to A's": figure(row.p50_ratio, ".2f"),
            "FLOPs": "-" if row.flops is None else human_count(row.flops),
            "FLOPs to A's": figure(row.flops_ratio, ".2f"),
        }
        for row in block.rows
    ]
    return f"batch {block.batch}, {what}:\n{table_of(rows)}"


command = Command(
    benchmark,
    _show,
    examples=[
        "benchmark MODEL OUT --batch 1,8",
        "benchmark MODEL OUT --onnx --threads 2",
        "benchmark DENSE_GRAPH PRUNED_GRAPH --generate 64",
    ],
    data=lambda result: result.model_dump(),
)
