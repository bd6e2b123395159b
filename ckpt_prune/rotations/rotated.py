"""A checkpoint seen through rotations: other tensors, the same function, absorbed as they are read."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.architectures.family import KINDS, Family
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.skeleton import is_stored_buffer
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.errors import UserError
from ckpt_prune.planning.names import RotationKind
from ckpt_prune.rotations.absorbing import fused, gains, no_gains, residual_of, turned

Added = dict[str, tuple[str, tuple[int, ...]]]
"""A tensor that the source has not → one of its tensors, whose file and dtype it shares, and its shape."""

BlockRotations = tuple[Tensor | None, Tensor]
"""R1 (d, d), None where the residual stream is not rotated, and R2 of every KV head (kv, head_dim, head_dim)."""

Rotations = Callable[[int], BlockRotations]
"""The rotations of any block."""


def not_learned(_block: int) -> BlockRotations:
    """Stands for rotations where only names and shapes are asked for.

    Raises:
        ValueError: always.
    """
    raise ValueError("the rotations are not learned yet")


ENTRY, EXIT = "entry_rotation", "exit_rotation"
"""Modules that turn the residual stream before and after a block, in `modeling_pruned`."""
CONFIG_KEY = "ckpt_prune_rotations"
_ROOM = (
    "it does not fit its dtype {dtype}: start from a bfloat16 or float32 copy of the model, or choose rotation kind "
    "values"
)
_ROWS = 8192
"""Rows of a table that absorb a rotation together, in float64."""


def check_rotatable(model: Model, kind: RotationKind) -> None:
    """Refuse to rotate a model whose residual stream is not plain pre-norm.

    Raises:
        UserError: with the reason.
    """
    family, config = model.family, model.config
    what = f"{family.model_type} cannot be rotated"
    if kind == "values":
        if not family.has_causal:
            raise UserError(f"{what}: which of its modules make values is described for causal language models only")
        if family.attention.latent:
            raise UserError(f"{what}: values of all its heads are made of one latent vector of a token")
    elif family.unrotatable is not None or family.residual is None:
        turns_values = family.has_causal and not family.attention.latent
        remedy = "; rotation kind values leaves the stream as it is" if turns_values else ""
        raise UserError(f"{what}: {family.unrotatable or 'its residual stream is not described'}{remedy}")
    elif family.head is None:
        raise UserError(f"{what} without a head ({family.architecture}): what reads its output would have to turn too")
    for refusal in family.residual.refused if family.residual is not None else []:
        concerned = refusal.kind == kind or (refusal.kind is None and kind != "values")
        if concerned and refusal.holds(config, model.dimension):
            raise UserError(f"{what}{' per layer' if refusal.kind == 'per-layer' else ''}: {refusal.why}")


@dataclass(frozen=True)
class RotatedCheckpoint:
    """What `Checkpoint` is to a job, under rotations.

    Args:
        model: the dense model.
        kind: per-layer: every block has its own R1, and modules between blocks turn the stream; shared: one R1 that is
            absorbed by what makes the stream and what reads it last, the head untied; values: R2 alone.
        rotations: of a block.
        device: where tensors absorb them.
    """

    model: Model
    kind: RotationKind
    rotations: Rotations
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    # ---- shapes, before any rotation is known ----------------------------------------------------------------

    @property
    def source(self) -> Checkpoint:
        """The dense checkpoint."""
        return self.model.checkpoint

    @property
    def family(self) -> Family:
        """The dense model's description."""
        return self.model.family

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.model.blocks

    @cached_property
    def _embedding(self) -> str:
        return f"{self.family.on_disk(self.family.embedding or '')}.weight"

    @cached_property
    def _head(self) -> str:
        return f"{self.family.head}.weight"

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
        """Tensors that the source has not, or not of that shape: name → whose file and dtype they share, and shape."""
        found: Added = {name: (name, (1,)) for name in self._gainless}
        hidden = self.model.dimension("hidden")
        if self.kind == "shared" and self._head not in self.source.tensors:
            found[self._head] = (self._embedding, self.source.tensors[self._embedding].shape)
        for side, module in (("entry", ENTRY), ("exit", EXIT)):
            for block in self.turns.get(side, []):
                found[self.family.tensor(block, module)] = (self._values(block), (hidden, hidden))
        return found

    @cached_property
    def _gainless(self) -> list[str]:
        """Norms of the blocks that the stream is turned for: one number stands for their gains, or for their biases.

        No stock class takes that shape. One that did would pass over the modules that turn the stream.
        """
        blocks = sorted({block for blocks in self.turns.values() for block in blocks})
        norms = residual_of(self.family).reads if blocks else {}
        names = [self.family.tensor(block, norm, kind) for block in blocks for norm in norms for kind in KINDS]
        return [name for name in names if name in self.source.tensors]

    @cached_property
    def added_biases(self) -> frozenset[str]:
        """Linear modules of a block that get a bias from a norm's, and have none."""
        if self.kind == "values":
            return frozenset()
        found = set()
        for norm, modules in residual_of(self.family).reads.items():
            if self.family.tensor(0, norm, "bias") in self.source.tensors:
                found |= {m for m in modules if self.family.tensor(0, m, "bias") not in self.source.tensors}
        return frozenset(found)

    def _values(self, block: int) -> str:
        return self.family.tensor(block, self.family.attention.value)

    def config_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """The output's config.json with what the rotations change in it."""
        if self.kind == "shared":
            return values | {"tie_word_embeddings": False}
        return values | {CONFIG_KEY: self.turns} if self.turns else values

    # ---- tensors ---------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """On-disk names of all tensors."""
        return list(dict.fromkeys([*self.source.tensors, *self.added]))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors outside the blocks, in their dtype."""
        return {name: fitting(name, self._outside(name), _ROOM) for name in names}

    def block(self, index: int) -> dict[str, Tensor]:
        """The tensors of block `index`, rotations absorbed in float64, in the dtype of the source."""
        tensors = {name: tensor.to(self.device) for name, tensor in self.model.read_block(index).items()}
        residual, heads = self.on_device(index)
        if residual is not None:
            tensors = fused(self.family, index, tensors)
        tensors = turned(self.family, index, tensors, residual, heads)
        # The norms that one number is left of add nothing to it.
        tensors |= {n: torch.full_like(tensors[n][:1], n.endswith(".weight")) for n in self._gainless if n in tensors}
        if index in self.turns.get("entry", []):
            assert residual is not None
            tensors[self.family.tensor(index, ENTRY)] = self._entry(index, residual)
        if index in self.turns.get("exit", []):
            assert residual is not None
            tensors[self.family.tensor(index, EXIT)] = residual
        dtypes = stored_dtypes(self.source, tensors, self._values(index))
        return {name: fitting(name, tensor.to(dtypes[name]).cpu(), _ROOM) for name, tensor in tensors.items()}

    def on_device(self, index: int) -> BlockRotations:
        """A block's rotations where tensors absorb them."""
        residual, heads = self.rotations(index)
        return residual.to(self.device) if residual is not None else None, heads.to(self.device)

    def norms(self, index: int) -> dict[str, Tensor]:
        """Gains and biases of a dense block's norms, before they are absorbed."""
        norms = residual_of(self.family).reads
        names = [self.family.tensor(index, norm, kind) for norm in norms for kind in KINDS]
        return self.source.read(name for name in names if name in self.source.tensors)

    def _entry(self, index: int, residual: Tensor) -> Tensor:
        """Weight of the module before a block with this R1: from the basis of the block before it into its own."""
        if index > 0:
            return residual.T @ self._residual(index - 1)
        if residual_of(self.family).norm == "layer":
            # The embedding absorbs nothing here, and its mean has to go.
            return residual.T - residual.T.mean(1, keepdim=True)
        return residual.T.clone()

    def _outside(self, name: str) -> Tensor:
        if is_stored_buffer(name) or not self.absorbs_ends:
            return self.source.read([name])[name]
        described = residual_of(self.family)
        starts = {f"{self.family.on_disk(path)}.weight" for path in described.starts}
        final, shift = (f"{self.family.on_disk(described.final)}.{kind}" for kind in KINDS)
        if name == self._head:
            table = name if name in self.source.tensors else self._embedding
            weight, gain = self.source.read([table])[table], gains(self.family, self._tensor(final))
            last = self._residual(self.blocks - 1)
            return in_rows(weight, self.device, lambda part: (part if gain is None else part * gain) @ last)
        if name in starts:
            tensor = self.source.read([name])[name]
            layer = described.norm == "layer"
            first = self._residual(0)
            return in_rows(
                tensor, self.device, lambda part: (part - part.mean(1, keepdim=True) if layer else part) @ first
            )
        if name == final:
            return no_gains(self.family, self.source.read([name])[name])
        if name == shift:
            shifts = self._tensor(shift)
            assert shifts is not None
            last = self._residual(self.blocks - 1)
            return self._final_shift(shifts, gains(self.family, self._tensor(final)), last).cpu()
        return self.source.read([name])[name]

    def _residual(self, index: int) -> Tensor:
        """R1 of a block. Each is asked for where it is needed: the last one may not be learned yet."""
        residual, _ = self.on_device(index)
        assert residual is not None
        return residual

    def _tensor(self, name: str) -> Tensor | None:
        return self.source.read([name])[name].to(self.device) if name in self.source.tensors else None

    def check_final_norm(self) -> None:
        """Refuse a final norm that the head cannot absorb.

        Raises:
            UserError: it has a bias where its gain is zero.
        """
        if not self.absorbs_ends:
            return
        final = self.family.on_disk(residual_of(self.family).final)
        gain, shift = gains(self.family, self._tensor(f"{final}.weight")), self._tensor(f"{final}.bias")
        if gain is not None and shift is not None and bool(((gain == 0) & (shift != 0)).any()):
            raise UserError(
                "the final norm has a bias where its gain is zero, which no rotated head can repeat: "
                "rotation kind values or per-layer leaves it alone"
            )

    def _final_shift(self, shift: Tensor, gain: Tensor | None, last: Tensor) -> Tensor:
        """The final norm's bias, before gains and R1 that now stand in the head."""
        wide = shift.double()
        if gain is not None:
            wide = torch.where(gain == 0, 0.0, wide / gain)
        return (wide @ last).to(shift.dtype)


def in_rows(table: Tensor, device: torch.device, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A table changed row by row in float64, a few rows at a time, in its own dtype and on CPU.

    Args:
        table: (rows, d).
        device: where it is changed.
        change: what becomes of some rows.
    """
    runs = (table[start : start + _ROWS] for start in range(0, table.shape[0], _ROWS))
    return torch.cat([change(run.to(device).double()).to(table.dtype).cpu() for run in runs])


def stored_dtypes(source: Checkpoint, names: Iterable[str], beside: str) -> dict[str, torch.dtype]:
    """The dtype that each tensor is stored in: the source's own, or that of `beside` where the source has none."""
    known = source.tensors
    return {name: known[name if name in known else beside].dtype for name in names}


def fitting(name: str, tensor: Tensor, room: str) -> Tensor:
    """A tensor that has absorbed something, if its dtype holds it.

    Args:
        name: on disk.
        tensor: in its dtype.
        room: what to say and do where it is not finite, with a place for its dtype.

    Raises:
        UserError: it does not.
    """
    if not torch.isfinite(tensor).all():
        raise UserError(f"{name}: with the gains of norms absorbed {room.format(dtype=tensor.dtype)}")
    return tensor
