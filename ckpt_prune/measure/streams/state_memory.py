"""Tensors for hidden states: in memory, or memory-mapped on disk above a stated size."""

import math
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ckpt_prune.checkpoint.disk_space import check_free_space, reserve_space
from ckpt_prune.checkpoint.staging import disk_failures

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Shape and dtype → a tensor on CPU whose values are to be written."""


def allocate_in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor in memory whose values are to be written."""
    return torch.empty(shape, dtype=dtype)


class StateMemory:
    """Hands out tensors in memory up to a total size, then memory-mapped ones.

    The room of a tensor in memory is free again once nothing refers to its values, views included. Results do not
    depend on where a tensor is.

    Args:
        limit: bytes in memory at most.
        folder: the files are there, or beside it if it does not exist (yet). Each is unlinked as soon as it is mapped,
            so that none is left however a run ends.
        what: the states that go there, and `remedy`, what takes fewer, for the message of a full disk.
    """

    def __init__(
        self,
        limit: int,
        folder: Path,
        *,
        what: str = "hidden states beyond --state-memory",
        remedy: str = "fewer samples, shorter windows or --compute-dtype bfloat16",
    ) -> None:
        self._free, self._folder = limit, folder
        self._what, self._remedy = f"{what} need", f", or take {remedy}"

    @property
    def free(self) -> int:
        """Bytes that may still be taken in memory."""
        return self._free

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor on CPU whose values are to be written."""
        size = math.prod(shape) * dtype.itemsize
        if size <= self._free:
            self._free -= size
            tensor = allocate_in_memory(shape, dtype)
            # The storage lives as long as any view of the tensor.
            weakref.finalize(tensor.untyped_storage(), self._give_back, size).atexit = False
            return tensor
        folder = self._folder if self._folder.is_dir() else self._folder.parent
        check_free_space(folder, size, self._what, self._remedy)
        with disk_failures(folder):
            descriptor, name = tempfile.mkstemp(prefix=".ckpt-prune-states-", dir=folder)
            path, nameless = Path(name), Path(f"/proc/self/fd/{descriptor}")
            try:
                if nameless.exists():  # so that a kill while gigabytes are claimed leaves nothing
                    path.unlink()
                # Claimed at once: a full disk would otherwise kill the process when a page is written.
                reserve_space(descriptor, size)
                file = str(path if path.exists() else nameless)
                mapped = torch.from_file(file, shared=True, size=math.prod(shape), dtype=dtype)
            finally:
                os.close(descriptor)
                path.unlink(missing_ok=True)
        return mapped.view(shape)

    def has_room(self, tensor: Tensor) -> bool:
        """Say whether a tensor that could be done without has room in memory, half of which stays free; count it if so.

        Its room is free again once nothing refers to its values.
        """
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if 2 * size > self._free:
            return False
        self._free -= size
        weakref.finalize(storage, self._give_back, size).atexit = False
        return True

    def _give_back(self, size: int) -> None:
        self._free += size
