"""Outputs of a graph on disk: logits of a long window can take as much memory as half of the model."""

import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from ckpt_prune.checkpoint.staging import disk_failures

LARGE = 1 << 20
"""Bytes of the largest output that stays in memory."""


class StoredTensor:
    """A tensor in a temporary file without a name, which goes with it; its rows are read when they are asked for."""

    def __init__(
        self, file: BinaryIO, shape: torch.Size, dtype: torch.dtype, owner: "StoredTensor | None" = None
    ) -> None:
        self._file, self.shape, self._dtype, self._owner = file, shape, dtype, owner
        if owner is None:
            weakref.finalize(self, file.close)

    @classmethod
    def of(cls, values: Tensor) -> "StoredTensor":
        with disk_failures(Path(tempfile.gettempdir())):
            file: BinaryIO = tempfile.TemporaryFile(prefix="ckpt-prune-")  # noqa: SIM115 (it is closed with the object)
            file.write(_as_bytes(values.contiguous()))
            file.flush()
        return cls(file, values.shape, values.dtype)

    def flatten(self) -> "StoredTensor":
        """Return the same, of (B, T, ...), as (positions, units)."""
        shape = torch.Size((self.shape[:2].numel(), self.shape[2:].numel()))
        return StoredTensor(self._file, shape, self._dtype, self)

    def read(self) -> Tensor:
        return self[:]

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        values = torch.empty((stop - start, *self.shape[1:]), dtype=self._dtype)
        self._file.seek(start * self.shape[1:].numel() * values.itemsize)
        self._file.readinto(_as_bytes(values))  # type: ignore[attr-defined]
        return values


def _as_bytes(values: Tensor) -> memoryview:
    return values.numpy().reshape(-1).view(np.uint8).data


Output = Tensor | StoredTensor


def store_large(outputs: Mapping[str, Tensor]) -> dict[str, Output]:
    """Return outputs by name, with the large ones on disk and copies of the others.

    onnxruntime's own tensors each hold all the memory that it runs in, as long as they live.
    """
    return {name: StoredTensor.of(value) if value.nbytes > LARGE else value.clone() for name, value in outputs.items()}


def read_stored(output: Output) -> Tensor:
    return output.read() if isinstance(output, StoredTensor) else output
