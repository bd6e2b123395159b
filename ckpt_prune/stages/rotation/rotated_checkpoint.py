"""Checkpoint under rotations: other tensors, the same function, absorbed as they are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.job.layout import Added
from ckpt_prune.model.family import KINDS, Family
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import is_stored_buffer
from ckpt_prune.recipe.names import RotationKind
from ckpt_prune.stages.rotation.absorbing import (
    fuse_norms,
    norm_gains,
    residual_of,
    rotate_block,
    subtract_mean,
    unit_gains,
)

_ROWS = 8192
"""Rows of a table that absorb a matrix together, in float64."""


class AbsorbedCheckpoint(ABC):
    """Stands in for a `Checkpoint` in a job whose residual stream lies in other bases.

    Tensors of `model` absorb matrices on `device`.
    """

    model: Model
    device: torch.device
    room: ClassVar[str]
    """The message where a tensor's dtype cannot hold what it absorbed, with the remedy and a place for the dtype."""

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


BlockRotations = tuple[Tensor | None, Tensor]
"""R1 (d, d), None where the residual stream is not rotated, and R2 of every KV head (kv, head_dim, head_dim)."""

Rotations = Callable[[int], BlockRotations]
"""The rotations of any block."""


def not_learned(_block: int) -> BlockRotations:
    """Stand in for rotations if only names and shapes are needed."""
    raise ValueError("the rotations are not learned yet")


ENTRY, EXIT = "entry_rotation", "exit_rotation"
"""Modules that turn the residual stream before and after a block, in `modeling_pruned`."""
CONFIG_KEY = "ckpt_prune_rotations"


def check_rotatable(model: Model, kind: RotationKind) -> None:
    """Refuse to rotate a model whose residual stream is not plain pre-norm, with the reason."""
    family, config = model.family, model.config
    turns_values = family.has_causal and not family.attention.latent
    what = f"{family.model_type} cannot be rotated"
    if kind == "values":
        if not family.has_causal:
            raise UserError(f"{what}: which of its modules make values is described for causal language models only")
        if family.attention.latent:
            raise UserError(f"{what}: values of all its heads are made of one latent vector of a token")
    elif family.unrotatable is not None or family.residual is None:
        remedy = "; rotation kind values leaves the stream as it is" if turns_values else ""
        raise UserError(f"{what}: {family.unrotatable or 'its residual stream is not described'}{remedy}")
    elif family.head is None or not family.gives_logits:
        remedy = "; rotation kind values leaves the stream as it is" if turns_values else ""
        raise UserError(
            f"{what} without a vocabulary head ({family.architecture}): what reads its output would have to turn "
            f"too{remedy}"
        )
    for refusal in family.residual.refused if family.residual is not None else []:
        concerned = refusal.kind == kind or (refusal.kind is None and kind != "values")
        if concerned and refusal.holds(config, model.dimension):
            raise UserError(f"{what}{' per layer' if refusal.kind == 'per-layer' else ''}: {refusal.why}")


@dataclass(frozen=True)
class RotatedCheckpoint(AbsorbedCheckpoint):
    """Stands in for a `Checkpoint` in a job with rotations.

    Args:
        kind: per-layer: every block has its own R1, and modules between blocks turn the stream; shared: one R1 that is
            absorbed by what makes the stream and what reads it last, the head untied; values: R2 alone.
    """

    model: Model
    kind: RotationKind
    rotations: Rotations
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    room: ClassVar[str] = (
        "it does not fit its dtype {dtype}: start from a bfloat16 or float32 copy of the model, or choose rotation "
        "kind values"
    )

    # ---- shapes, before any rotation is known ----------------------------------------------------------------

    @property
    def blocks(self) -> int:
        return self.model.blocks

    @cached_property
    def tied(self) -> bool:
        """Whether the source's head is its embedding."""
        return self.model.tied

    @cached_property
    def absorbs_ends(self) -> bool:
        """Whether R1 of the first and last block goes into embedding and head.

        A tied head would have to be untied, which costs more than two matrices of the stream's width, and the bias of
        a final LayerNorm has no place in a head.
        """
        if self.kind == "shared":
            return True
        return self.kind == "per-layer" and not self.tied and residual_of(self.family).norm == "rms"

    @cached_property
    def turns(self) -> dict[str, list[int]]:
        """Blocks before (entry) and after (exit) which a module turns the stream."""
        if self.kind != "per-layer":
            return {}
        if self.absorbs_ends:
            inner = list(range(1, self.blocks))
            return {"entry": inner, "exit": []} if inner else {}
        return {"entry": list(range(self.blocks)), "exit": [self.blocks - 1]}

    @cached_property
    def added(self) -> Added:
        """Tensors that the source lacks, or has in another shape (`AbsorbedCheckpoint.added`)."""
        added: Added = {name: (name, (1,)) for name in self._gainless}
        hidden = self.model.dimension("hidden")
        if self.kind == "shared" and self._head not in self.source.tensors:
            added[self._head] = (self._table, self.source.tensors[self._table].shape)
        for side, module in (("entry", ENTRY), ("exit", EXIT)):
            for block in self.turns.get(side, []):
                added[self.family.tensor(block, module)] = (self._value(block), (hidden, hidden))
        return added

    @cached_property
    def _gainless(self) -> list[str]:
        """Norms of the blocks that the stream is turned for: one number stands for their gains, or for their biases.

        No stock class takes that shape. One that did would ignore the modules that turn the stream.
        """
        blocks = sorted({block for blocks in self.turns.values() for block in blocks})
        norms = residual_of(self.family).reads if blocks else {}
        names = [self.family.tensor(block, norm, kind) for block in blocks for norm in norms for kind in KINDS]
        return [name for name in names if name in self.source.tensors]

    @cached_property
    def added_biases(self) -> frozenset[str]:
        """Linear modules of a block that have no bias and get one from a norm."""
        return frozenset() if self.kind == "values" else super().added_biases

    def config_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the output's config.json with the changes that rotations need."""
        if self.kind == "shared":
            return values | {"tie_word_embeddings": False}
        return values | {CONFIG_KEY: self.turns} if self.turns else values

    # ---- tensors ---------------------------------------------------------------------------------------------

    def block(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of block `index`, rotations absorbed in float64, in the dtype of the source."""
        tensors = {name: tensor.to(self.device) for name, tensor in self.model.read_block(index).items()}
        residual, heads = self.on_device(index)
        if residual is not None:
            tensors = fuse_norms(self.family, index, tensors)
        tensors = rotate_block(self.family, index, tensors, residual, heads)
        # The norms that one number is left of add nothing to it.
        tensors |= {n: torch.full_like(tensors[n][:1], n.endswith(".weight")) for n in self._gainless if n in tensors}
        if index in self.turns.get("entry", []):
            assert residual is not None
            tensors[self.family.tensor(index, ENTRY)] = self._entry(index, residual)
        if index in self.turns.get("exit", []):
            assert residual is not None
            tensors[self.family.tensor(index, EXIT)] = residual
        return self._to_stored(index, tensors)

    def on_device(self, index: int) -> BlockRotations:
        """Return a block's rotations on the device where tensors absorb them."""
        residual, heads = self.rotations(index)
        return residual.to(self.device) if residual is not None else None, heads.to(self.device)

    def norms(self, index: int) -> dict[str, Tensor]:
        """Read gains and biases of a dense block's norms, before they are absorbed."""
        norms = residual_of(self.family).reads
        names = [self.family.tensor(index, norm, kind) for norm in norms for kind in KINDS]
        return self.source.read(name for name in names if name in self.source.tensors)

    def _entry(self, index: int, residual: Tensor) -> Tensor:
        """Return the matrix from the basis of the block before into that of a block with this R1."""
        if index > 0:
            return residual.T @ self._residual(index - 1)
        if residual_of(self.family).norm == "layer":
            # The embedding absorbs nothing here, and its mean has to go.
            return residual.T - residual.T.mean(1, keepdim=True)
        return residual.T.clone()

    def _outside(self, name: str) -> Tensor:
        if is_stored_buffer(name) or not self.absorbs_ends:
            return self.source.read([name])[name]
        if name == self._head:
            return self._absorb_in_head(self._residual(self.blocks - 1))
        if name in self.starts:
            return self._absorb_start(name, self._residual(0))
        if self._final.get(name) == "weight":
            return unit_gains(self.family, self.source.read([name])[name])
        if self._final.get(name) == "bias":
            return self._final_shift(self._residual(self.blocks - 1))
        return self.source.read([name])[name]

    def _residual(self, index: int) -> Tensor:
        """Return R1 of a block. Each is asked for when it is needed: the last one may not be learned yet."""
        residual, _ = self.on_device(index)
        assert residual is not None
        return residual

    def check_final_norm(self) -> None:
        """Refuse a final norm that the head cannot absorb: one with a bias where its gain is zero."""
        if not self.absorbs_ends:
            return
        gain, shift = self._gain, self._final_tensor("bias")
        if gain is not None and shift is not None and bool(((gain == 0) & (shift != 0)).any()):
            raise UserError(
                "the final norm has a bias where its gain is zero, which no rotated head can repeat: "
                "rotation kind values or per-layer leaves it alone"
            )
