"""What rotated and sliced checkpoints share: a dense model whose tensors absorb matrices as they are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ckpt_prune.architectures.family import KINDS, Family
from ckpt_prune.architectures.model import Model
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.job.layout import Added
from ckpt_prune.stages.rotation.absorbing import norm_gains, residual_of, subtract_mean

_ROWS = 8192
"""Rows of a table that absorb a matrix together, in float64."""


class AbsorbedCheckpoint(ABC):
    """What `Checkpoint` is to a job whose residual stream lies in other bases.

    Args:
        model: the dense model.
        device: where tensors absorb matrices.
    """

    model: Model
    device: torch.device
    room: ClassVar[str]
    """What to say and do where a tensor's dtype does not hold what it absorbed, with a place for the dtype."""

    @property
    def source(self) -> Checkpoint:
        """The dense checkpoint."""
        return self.model.checkpoint

    @property
    def family(self) -> Family:
        """The dense model's description."""
        return self.model.family

    @property
    @abstractmethod
    def added(self) -> Added:
        """Tensors that the source has not, or not of that shape."""

    @abstractmethod
    def _outside(self, name: str) -> Tensor:
        """A tensor outside the blocks, in its dtype."""

    def names(self) -> list[str]:
        """On-disk names of all tensors."""
        return list(dict.fromkeys([*self.source.tensors, *self.added]))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors outside the blocks, in their dtype.

        Raises:
            UserError: its dtype does not hold one.
        """
        return {name: self._fitting(name, self._outside(name)) for name in names}

    @cached_property
    def added_biases(self) -> frozenset[str]:
        """Linear modules of a block that get a bias from a norm's, and have none."""
        found = set()
        for norm, modules in residual_of(self.family).reads.items():
            if self.family.tensor(0, norm, "bias") in self.source.tensors:
                found |= {m for m in modules if self.family.tensor(0, m, "bias") not in self.source.tensors}
        return frozenset(found)

    # ---- embedding, final norm and head --------------------------------------------------------------------------

    @cached_property
    def _head(self) -> str:
        return f"{self.family.head}.weight"

    @cached_property
    def _table(self) -> str:
        """What the head's weight is read from: a tied one is the embedding."""
        if self._head in self.source.tensors:
            return self._head
        return f"{self.family.on_disk(self.family.embedding or '')}.weight"

    @cached_property
    def starts(self) -> dict[str, int]:
        """What makes the stream → the axis of its dimensions."""
        described, on_disk = residual_of(self.family), self.family.on_disk
        found = {f"{on_disk(path)}.weight": -1 for path in described.starts}
        found |= {f"{on_disk(path)}.{kind}": 0 for path in described.projections for kind in KINDS}
        found |= {on_disk(name): -1 for name in described.tokens}
        return {name: axis for name, axis in found.items() if name in self.source.tensors}

    @cached_property
    def _final(self) -> dict[str, str]:
        """The final norm's tensors → their kind."""
        final = self.family.on_disk(residual_of(self.family).final)
        return {f"{final}.{kind}": kind for kind in KINDS if f"{final}.{kind}" in self.source.tensors}

    def _of_final(self, kind: str) -> Tensor | None:
        name = next((name for name, own in self._final.items() if own == kind), None)
        return None if name is None else self.source.read([name])[name].to(self.device)

    @property
    def _gain(self) -> Tensor | None:
        return norm_gains(self.family, self._of_final("weight"))

    def _final_shift(self, matrix: Tensor) -> Tensor:
        """The final norm's bias, before its gains and a matrix (d, k) that both stand in the head; in its dtype."""
        stored, gain = self._of_final("bias"), self._gain
        assert stored is not None
        shift = stored.double()
        wide = shift if gain is None else torch.where(gain == 0, 0.0, shift / gain)
        return (wide @ matrix).to(stored.dtype).cpu()

    def _started(self, name: str, matrix: Tensor) -> Tensor:
        """What makes the stream, times a matrix (d, k); a LayerNorm's mean is subtracted here."""
        layer, axis = residual_of(self.family).norm == "layer", self.starts[name]
        given = self.source.read([name])[name].movedim(axis, -1)
        table = given.reshape(-1, given.shape[-1])
        made = _in_rows(table, self.device, lambda part: (subtract_mean(part.T).T if layer else part) @ matrix)
        return made.view(*given.shape[:-1], -1).movedim(-1, axis).contiguous()

    def _read_last(self, matrix: Tensor) -> Tensor:
        """The head's weight with the final norm's gains, times a matrix (d, k)."""
        gain, table = self._gain, self.source.read([self._table])[self._table]
        return _in_rows(table, self.device, lambda part: (part if gain is None else part * gain) @ matrix)

    # ---- storing -------------------------------------------------------------------------------------------------

    def _value(self, block: int) -> str:
        """The tensor of a block that shares its file and dtype with those that the source has not."""
        return self.family.tensor(block, self.family.attention.value)

    def _stored(self, block: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A block's tensors in the dtype of the source, on CPU."""
        known, beside = self.source.tensors, self._value(block)
        dtypes = {name: known[name if name in known else beside].dtype for name in tensors}
        return {name: self._fitting(name, tensor.to(dtypes[name]).cpu()) for name, tensor in tensors.items()}

    def _fitting(self, name: str, tensor: Tensor) -> Tensor:
        if not all_finite(tensor):
            raise UserError(f"{name}: with the gains of norms absorbed {self.room.format(dtype=tensor.dtype)}")
        return tensor


def _in_rows(table: Tensor, device: torch.device, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A table (rows, d) changed row by row in float64, a few rows at a time, in its own dtype and on CPU."""
    runs = (table[start : start + _ROWS] for start in range(0, table.shape[0], _ROWS))
    return torch.cat([change(run.to(device).double()).to(table.dtype).cpu() for run in runs])
