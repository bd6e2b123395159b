"""`ckpt-prune benchmark`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.benchmark import benchmark
from ckpt_prune.cli.command import Command, table

if TYPE_CHECKING:
    from ckpt_prune.benchmarking.results import Block, Result, Row, Run

NONE = "-"
"""Stands for a figure that is not known."""


def _show(result: "Result", _options: dict[str, Any]) -> None:
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


def _runs(runs: "list[Run]") -> str:
    from ckpt_prune.common.formatting import human_bytes, human_count

    def size(count: int | None) -> str:
        return NONE if count is None else human_bytes(count)

    gpu = any(run.gpu_bytes is not None for run in runs)
    headers = ["", "runtime", "on", "type", "parameters", "on disk", "base memory", "peak memory"]
    rows = [
        [
            run.label,
            run.runtime,
            run.device,
            run.dtype if run.optimize in (None, "none") else f"{run.dtype}, fused for {run.optimize}",
            NONE if run.parameters is None else human_count(run.parameters),
            size(run.disk_bytes),
            size(run.base_bytes),
            size(run.peak_bytes),
            *([size(run.gpu_bytes)] if gpu else []),
        ]
        for run in runs
    ]
    return table([*headers, "GPU memory"] if gpu else headers, rows)


def _block(block: "Block") -> str:
    if block.phase == "decode":
        what = f"decode, one of {block.steps} tokens after {block.tokens}"
    elif block.tokens is not None:
        what = f"{block.phase} of {block.tokens} tokens"
    else:
        what = "forward"
    headers = ["", "runtime", "p50 ms", "p95 ms", f"{block.unit}/s", "p50 to A's", "FLOPs", "FLOPs to A's"]
    return f"batch {block.batch}, {what}:\n" + table(headers, [_row(row) for row in block.rows])


def _row(row: "Row") -> list[str]:
    from ckpt_prune.common.formatting import human_count

    return [
        row.label,
        row.runtime,
        f"{row.p50_ms:.2f}",
        f"{row.p95_ms:.2f}",
        f"{row.throughput:,.1f}",
        _share(row.p50_ratio),
        NONE if row.flops is None else human_count(row.flops),
        _share(row.flops_ratio),
    ]


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


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
