"""`ckpt-prune benchmark`."""

from typing import TYPE_CHECKING, Any, get_args

import click

from ckpt_prune.api.benchmark import benchmark
from ckpt_prune.cli.options import (
    checked_model,
    device_option,
    echo_json,
    json_option,
    options_of,
    table,
    trust_option,
)
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.options import SpreadOptions

if TYPE_CHECKING:
    from ckpt_prune.benchmarking.results import Block, Result, Row, Run

NONE = "-"
"""Stands for a figure that is not known."""


@click.command("benchmark")
@click.argument("a", metavar="A", callback=checked_model)
@click.argument("b", metavar="B", callback=checked_model)
@click.option("--onnx", is_flag=True, help="Time both in onnxruntime as well.")
@click.option("--batch", "batches", default="1", show_default=True, metavar="N[,N...]", help="Texts or images at once.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="Tokens of each text. [default: 128, or what the shorter context has room for]",
)
@click.option(
    "--generate",
    type=click.IntRange(min=0),
    metavar="N",
    help="Tokens to generate after the text, with the cache; 0 for none. [default: 16 where both models can, less in a "
    "short context]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=30, show_default=True, help="Times that each is timed.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Rounds before them, not counted."
)
@click.option("--threads", type=click.IntRange(min=1), help="Of each model. [default: as many as PyTorch takes]")
@click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    help="Of onnxruntime. [default: cuda where --device is, else cpu]",
)
@device_option
@options_of(SpreadOptions)
@click.option(
    "--optimize",
    type=click.Choice(["none", "cpu", "cuda"]),
    help="Fuse graphs made here for this provider. [default: none, a graph in the checkpoint's folder onnx as it is]",
)
@click.option(
    "--dtype",
    type=click.Choice(get_args(GraphType)),
    help="Of graphs made here or taken from the checkpoint's folder onnx; PyTorch computes in fp32, or in fp16 too. "
    "Weights of int8, int4 and q4f16 are rounded alike here, to time them. [default: fp32, a graph in the checkpoint's "
    "folder onnx as it is]",
)
@click.option(
    "--two-four",
    is_flag=True,
    help="Also time checkpoints whose weights hold 2:4 by torch's semi-structured kernels: NVIDIA GPUs of compute "
    "capability 8.0 or later, --dtype fp16. Elsewhere a line says why not.",
)
@trust_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Time A, the dense model, against B, the pruned one: latency, throughput, size and peak memory.

    Both are loaded WHOLE, each in a process of its own, a second time for --onnx, and all stay in memory together.
    They are timed in turns, a round being each of them once, so that whatever else the machine does slows all of
    them alike; who waits does not compute.

    Percentiles are of all timings; throughput is what the median gives. Few rounds say little of p95.

    Both get the same random tokens or images (seed 0). A causal language model reads the text (prefill) and then
    generates token by token with the cache (decode, timed by the token); other models read it in one pass. Ratios are
    to A in the same runtime. Peak memory is that of a process, with its base, what it takes without a model, beside it;
    GPU memory is known of PyTorch, not of onnxruntime.

    With --onnx a checkpoint is exported, unless its own folder onnx has a graph of it for the same task. Such graphs
    are in the folder for temporary files (TMPDIR) until the run ends: it must have room for both. A and B may also be
    folders written by export: these run in onnxruntime alone.

    \b
      ckpt-prune benchmark MODEL OUT --batch 1,8
      ckpt-prune benchmark MODEL OUT --onnx --threads 2
      ckpt-prune benchmark DENSE_GRAPH PRUNED_GRAPH --generate 64
    """
    result = benchmark(**given)
    if as_json:
        echo_json(result.model_dump())
    else:
        click.echo(show(result))


def show(result: "Result") -> str:
    """A result as people read it."""
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
    return "\n\n".join(parts)


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
