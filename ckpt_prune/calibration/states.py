"""Where hidden states are kept: in memory, or memory-mapped on disk above a stated size."""

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.checkpoint.writing import check_room, claim

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Shape and dtype to a tensor on CPU whose values are to be written."""


def in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in memory."""
    return torch.empty(shape, dtype=dtype)


class StateMemory:
    """Hands out tensors in memory up to a size in all, then memory-mapped ones.

    Results do not depend on which it was.

    Args:
        limit: bytes in memory at most.
        folder: where the files are. Each is unlinked as soon as it is mapped, so that none is left however a run ends.
    """

    def __init__(self, limit: int, folder: Path) -> None:
        self._left, self._folder = limit, folder

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on CPU whose values are to be written.

        Raises:
            UserError: the disk has no room for what does not fit in memory.
        """
        size = math.prod(shape) * dtype.itemsize
        if size <= self._left:
            self._left -= size
            return in_memory(shape, dtype)
        remedy = ", or take fewer samples, shorter windows or --compute-dtype bfloat16"
        check_room(self._folder, size, "hidden states beyond --state-memory need", remedy)
        with disk_failures(self._folder):
            descriptor, name = tempfile.mkstemp(prefix=".ckpt-prune-states-", dir=self._folder)
            try:
                # Claimed at once: a full disk would otherwise kill the process when a page is written.
                claim(descriptor, size)
                mapped = torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype)
            finally:
                os.close(descriptor)
                Path(name).unlink()
        return mapped.view(shape)
