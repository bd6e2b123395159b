"""Hidden states of a model at the ends of its blocks, kept on disk, so that its blocks need not run once more."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.folder import write_tensors
from ckpt_prune.model.model import Model


@dataclass(frozen=True)
class EndStates:
    """States behind every block of a model, (rows, T, hidden) in the type that blocks run in.

    Attributes:
        model: whose blocks.
        samples: that ran through them.
        rows: of the samples whose states are kept.
        folder: of the files, one for each block.
        dtype: of the states.
    """

    model: Model
    samples: Samples
    rows: range
    folder: Path
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        tokens = len(self.rows) * self.samples.tokens
        return self.model.blocks * tokens * self.model.dimension("hidden") * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """True if states are kept of every block."""
        return all(path.is_file() for path in self.files)

    @property
    def files(self) -> list[Path]:
        """The file of each block."""
        return [self.folder / _name_file(block) for block in range(self.model.blocks)]

    def write(self, block: int, states: Tensor) -> None:
        """Keep the states of all samples behind a block, (N, T, hidden), as far as they are wanted."""
        kept = states[self.rows.start : self.rows.stop].contiguous()
        write_tensors(self.folder, _name_file(block), {"states": kept})
        with disk_failures(self.folder):
            sync(self.folder / _name_file(block))

    def read(self, block: int, rows: range | None = None) -> Tensor:
        """Read the states behind a block of some of the samples whose states are kept, by default of all of these."""
        asked_rows = self.rows if rows is None else rows
        if asked_rows.start < self.rows.start or asked_rows.stop > self.rows.stop:
            raise ValueError(f"states of samples {self.rows} are kept, not of {asked_rows}")
        with safe_open(self.folder / _name_file(block), framework="pt") as file:
            states: Tensor = file.get_slice("states")[
                asked_rows.start - self.rows.start : asked_rows.stop - self.rows.start
            ]
        return states


def _name_file(block: int) -> str:
    return f"states-{block:05d}.safetensors"
