"""`ckpt_prune.benchmark`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ckpt_prune.api.types import AnyModel, Provider
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.options import BenchmarkOptions, SpreadOptions, checked

if TYPE_CHECKING:
    from ckpt_prune.benchmarking.results import Result


def benchmark(
    a: AnyModel,
    b: AnyModel,
    *,
    onnx: bool = False,
    batches: str | Sequence[int] = "1",
    tokens: int | None = None,
    generate: int | None = None,
    rounds: int = 30,
    warmup: int = 3,
    threads: int | None = None,
    provider: Provider | None = None,
    optimize: Literal["none", "cpu", "cuda"] | None = None,
    dtype: GraphType | None = None,
    two_four: bool = False,
    device_map: Literal["auto"] | None = None,
    max_memory: str | Sequence[str] = (),
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> "Result":
    """Time two models in turns, as `ckpt-prune benchmark` does. Both are loaded whole, each in its own process.

    Args:
        a: the reference, usually dense: a folder, a Hub id or a result; checkpoint or exported graph.
        b: what is compared with it.
        onnx: time both in onnxruntime as well.
        batches: texts or images at once.
        tokens: of each text; None for 128, or what the shorter context has room for.
        generate: tokens to generate after the text, with the cache; None for 16 where both models can.
        rounds: times that each is timed.
        warmup: rounds before them, not counted.
        threads: of each model; None for as many as PyTorch takes.
        provider: of onnxruntime; None for cuda where the device is, else cpu.
        optimize: fuse graphs made here for this provider.
        dtype: of graphs made here, and fp16 of PyTorch too.
        two_four: also time checkpoints whose weights hold 2:4 by torch's kernels for that, on a GPU in fp16.
        device_map: "auto": accelerate puts the parts of models where there is room; None for one device.
        max_memory: most that a device takes of them, "cpu=24GiB" or "0=70GiB".
        trust_remote_code: run code that a folder brings.
        device: of PyTorch: auto, cpu, cuda or cuda:i.
        progress: show bars and notices on stderr.

    Raises:
        UserError: the two cannot be compared, cannot be loaded or exported, or a process dies.
    """
    given = locals()
    options, spreading = checked(BenchmarkOptions, given), checked(SpreadOptions, given)
    sizes = _batches(options.batches)

    from ckpt_prune.benchmarking.run import compare

    with show_progress(progress):
        return compare(options, sizes, spreading, Notices())


def _batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--batch {text}: expected whole numbers from 1, for example 1,8")
    return tuple(dict.fromkeys(int(part) for part in parts))
