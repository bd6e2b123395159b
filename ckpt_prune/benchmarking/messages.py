"""What a benchmark's processes send each other. Nothing heavy is imported here (`worker`)."""

from dataclasses import dataclass
from typing import Literal

from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.options import SpreadOptions

Phase = Literal["prefill", "decode", "forward"]
Runtime = Literal["PyTorch", "onnxruntime", "PyTorch 2:4"]
"""The last is PyTorch with torch's semi-structured kernels for weights that hold 2:4."""
Timing = dict[Phase, list[float]]
"""Phase → seconds of each of its timings: one, or in decode one per step."""


@dataclass(frozen=True)
class Seat:
    """What one process runs."""

    label: Literal["A", "B"]
    model: str
    """As the user named it."""
    runtime: Runtime
    folder: str
    """The folder of the checkpoint, or of the graph."""
    device: str
    """As torch names it: cpu, cuda or cuda:1."""
    threads: int
    dtype: GraphType
    """That PyTorch computes in, fp32 or fp16; of a graph its own, by which its file is called."""
    trust: bool = False
    spread: SpreadOptions | None = None
    """Over which devices PyTorch's model is spread."""

    def __str__(self) -> str:
        return f"{self.model} in {self.runtime}"


@dataclass(frozen=True)
class Ready:
    """A model is loaded."""

    device: str
    """Where it runs, named in the same way."""
    note: str | None
    """Why that is not what was asked for."""


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the system does not say."""

    base: int | None
    """Resident before the model was loaded: the interpreter and libraries."""
    peak: int | None
    """Largest resident size, the base included."""
    gpu: int | None
    """Most that PyTorch had allocated on the GPU."""


@dataclass(frozen=True)
class Failure:
    """Why a process gave up, in one line."""

    reason: str
