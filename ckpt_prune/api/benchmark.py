"""`ckpt_prune.benchmark`."""

from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.options.commands import BenchmarkOptions
from ckpt_prune.options.machine import SpreadOptions
from ckpt_prune.options.option import select_options

if TYPE_CHECKING:
    from ckpt_prune.benchmarking.results import Benchmark


@takes(BenchmarkOptions)
def benchmark(options: BenchmarkOptions) -> "Benchmark":
    """Time A, the dense model, against B, the pruned one: latency, throughput, size and peak memory.

    Both are loaded whole, each in a process of its own, a second time for --onnx, and all stay in memory together. They
    take turns: a round times each of them once, so that whatever else the machine does slows all of them alike. A
    process that waits does not compute. Percentiles are of all timings, throughput is that of the median. Few rounds
    say little about p95.

    Both get the same random tokens or images (seed 0). A causal language model reads the text (prefill) and then
    generates token by token with the cache (decode, timed by the token); other models read it in one pass. Ratios are
    relative to A in the same runtime. Peak memory is that of a process; the base next to it is what the process takes
    without a model. GPU memory is known for PyTorch, not for onnxruntime.

    With --onnx a checkpoint is exported, unless its own folder onnx has a graph of it for the same task. Such graphs
    stay in the folder for temporary files (TMPDIR) until the run ends; it must have room for both. A and B may also be
    folders that `export` wrote: these run in onnxruntime alone.
    """
    sizes = _batches(options.batches)

    from ckpt_prune.benchmarking.run import compare

    return compare(options, sizes, select_options(options, SpreadOptions), Notices())


def _batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--batch {text}: expected whole numbers from 1, for example 1,8")
    return tuple(dict.fromkeys(int(part) for part in parts))
