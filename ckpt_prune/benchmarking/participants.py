"""The types that the processes of a benchmark exchange. Nothing heavy is imported here."""

from dataclasses import dataclass
from typing import Literal

from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.options.machine import SpreadOptions

Label = Literal["A", "B"]
Phase = Literal["prefill", "decode", "forward", "block"]
Runtime = Literal["PyTorch", "onnxruntime", "PyTorch 2:4", "PyTorch, unturned", "PyTorch 2:4, unturned"]
"""2:4: with torch's semi-structured kernels for weights that hold 2:4. Unturned: without the matrices that turn the
residual stream between blocks, which is another function in less time."""
Timing = dict[Phase, list[float]]
"""Phase → seconds: one figure, in decode one per step, and of blocks one for each."""


@dataclass(frozen=True)
class Participant:
    """One model in one runtime, which gets a process of its own."""

    label: Label
    model: str
    """The name that the user gave."""
    runtime: Runtime
    folder: str
    """Path of the checkpoint or of the graph."""
    device: str
    """Its name in torch: cpu, cuda or cuda:1."""
    threads: int
    dtype: GraphType
    """PyTorch computes in fp32 or fp16; a graph has its own type, which names its file."""
    trust: bool = False
    blocks: bool = False
    """Whether each of its blocks is timed as well."""
    spread: SpreadOptions | None = None

    def __str__(self) -> str:
        return f"{self.model} in {self.runtime}"


@dataclass(frozen=True)
class Loaded:
    """The device that a model runs on; `note` says why it is not the one that was asked for."""

    device: str
    note: str | None


@dataclass(frozen=True)
class Memory:
    """Bytes of a process; None if the system does not say."""

    base: int | None
    """Resident before the model was loaded."""
    peak: int | None
    """Largest resident size, the base included."""
    gpu: int | None
    """Most that PyTorch had allocated on the GPU."""
