"""Base of rotated and sliced checkpoints: a dense model whose tensors absorb matrices as they are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.job.layout import Added
from ckpt_prune.model.family import KINDS, Family
from ckpt_prune.model.model import Model
from ckpt_prune.stages.rotation.absorbing import norm_gains, residual_of, subtract_mean

_ROWS = 8192
"""Rows of a table that absorb a matrix together, in float64."""


class AbsorbedCheckpoint(ABC):
    """Stands in for a `Checkpoint` in a job whose residual stream lies in other bases.

    Tensors of `model` absorb matrices on `device`.
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
        """Tensors that the source lacks, or has in another shape."""

    @abstractmethod
    def _outside(self, name: str) -> Tensor:
        """Return a tensor outside the blocks, in its dtype."""

    def names(self) -> list[str]:
        """List the on-disk names of all tensors."""
        return list(dict.fromkeys([*self.source.tensors, *self.added]))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors outside the blocks; refuse one that its dtype cannot hold."""
        return {name: self._fitting(name, self._outside(name)) for name in names}

    @cached_property
    def added_biases(self) -> frozenset[str]:
        """Linear modules of a block that have no bias and get one from a norm."""
        biased_modules = set()
        for norm, modules in residual_of(self.family).reads.items():
            if self.family.tensor(0, norm, "bias") in self.source.tensors:
                biased_modules |= {
                    module for module in modules if self.family.tensor(0, module, "bias") not in self.source.tensors
                }
        return frozenset(biased_modules)

    # ---- embedding, final norm and head --------------------------------------------------------------------------

    @cached_property
    def _head(self) -> str:
        return f"{self.family.head}.weight"

    @cached_property
    def _table(self) -> str:
        """Name of the head's weight: that of the embedding if the two are tied."""
        if self._head in self.source.tensors:
            return self._head
        return f"{self.family.on_disk(self.family.embedding or '')}.weight"

    @cached_property
    def starts(self) -> dict[str, int]:
        """Tensors at the start of the stream → the axis of its dimensions."""
        described, on_disk = residual_of(self.family), self.family.on_disk
        axes = {f"{on_disk(path)}.weight": -1 for path in described.starts}
        axes |= {f"{on_disk(path)}.{kind}": 0 for path in described.projections for kind in KINDS}
        axes |= {on_disk(name): -1 for name in described.tokens}
        return {name: axis for name, axis in axes.items() if name in self.source.tensors}

    @cached_property
    def _final(self) -> dict[str, str]:
        """Tensors of the final norm → their kind."""
        final = self.family.on_disk(residual_of(self.family).final)
        return {f"{final}.{kind}": kind for kind in KINDS if f"{final}.{kind}" in self.source.tensors}

    def _final_tensor(self, kind: str) -> Tensor | None:
        name = next((name for name, own_kind in self._final.items() if own_kind == kind), None)
        return None if name is None else self.source.read([name])[name].to(self.device)

    @property
    def _gain(self) -> Tensor | None:
        return norm_gains(self.family, self._final_tensor("weight"))

    def _final_shift(self, matrix: Tensor) -> Tensor:
        """Return the final norm's bias, in its dtype, for a head that absorbs its gains and a matrix (d, k)."""
        stored, gain = self._final_tensor("bias"), self._gain
        assert stored is not None
        shift = stored.double()
        wide = shift if gain is None else torch.where(gain == 0, 0.0, shift / gain)
        return (wide @ matrix).to(stored.dtype).cpu()

    def _absorb_start(self, name: str, matrix: Tensor) -> Tensor:
        """Multiply a tensor at the start of the stream by a matrix (d, k), after subtracting a LayerNorm's mean."""
        layer, axis = residual_of(self.family).norm == "layer", self.starts[name]
        stored = self.source.read([name])[name].movedim(axis, -1)
        table = stored.reshape(-1, stored.shape[-1])
        absorbed = _in_rows(table, self.device, lambda part: (subtract_mean(part.T).T if layer else part) @ matrix)
        return absorbed.view(*stored.shape[:-1], -1).movedim(-1, axis).contiguous()

    def _absorb_in_head(self, matrix: Tensor) -> Tensor:
        """Return the head's weight with the final norm's gains, times a matrix (d, k)."""
        gain, table = self._gain, self.source.read([self._table])[self._table]
        return _in_rows(table, self.device, lambda part: (part if gain is None else part * gain) @ matrix)

    # ---- storing -------------------------------------------------------------------------------------------------

    def _value(self, block: int) -> str:
        return self.family.tensor(block, self.family.attention.value)

    def _to_stored(self, block: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a block's tensors to the dtype of the source, on CPU."""
        source_tensors, like = self.source.tensors, self._value(block)
        dtypes = {name: source_tensors[name if name in source_tensors else like].dtype for name in tensors}
        return {name: self._fitting(name, tensor.to(dtypes[name]).cpu()) for name, tensor in tensors.items()}

    def _fitting(self, name: str, tensor: Tensor) -> Tensor:
        if not all_finite(tensor):
            raise UserError(f"{name}: with the gains of norms absorbed {self.room.format(dtype=tensor.dtype)}")
        return tensor


def _in_rows(table: Tensor, device: torch.device, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change a table (rows, d) in float64, a few rows at a time; return it in its own dtype on CPU."""
    runs = (table[start : start + _ROWS] for start in range(0, table.shape[0], _ROWS))
    return torch.cat([change(run.to(device).double()).to(table.dtype).cpu() for run in runs])
