"""A checkpoint seen in bases of its residual stream that have fewer dimensions, absorbed as its tensors are read."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ckpt_prune.architectures.blocks import module_paths
from ckpt_prune.architectures.family import KINDS
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.sublayers import Sublayer, sublayers
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.layout import Added
from ckpt_prune.job.names import SlicingKind
from ckpt_prune.modeling_pruned import SKIPS, Slicing
from ckpt_prune.stages.hidden.bases import diagonalise_gains, slice_reader, slice_writer, stream_scale
from ckpt_prune.stages.rotation.absorbed_checkpoint import AbsorbedCheckpoint
from ckpt_prune.stages.rotation.absorbing import fuse_norms, norm_gains, residual_of, subtract_mean, unit_gains

Bases = Callable[[int], tuple[Tensor, ...]]
"""The basis (d, k) that each sub-layer of a block reads the stream in; of a shared one, the same everywhere."""
SLICING_KEY = "ckpt_prune_slicing"
ENTRY = "entry_slice"
"""Module that brings the dense stream into the basis of the first block, in `modeling_pruned`."""


def not_measured(_block: int) -> tuple[Tensor, ...]:
    """Stands for bases where only names and shapes are asked for.

    Raises:
        ValueError: always.
    """
    raise ValueError("the bases are not measured yet")


def check_sliceable(model: Model, kind: SlicingKind) -> None:
    """Refuse to slice a model whose residual stream no basis passes through.

    Raises:
        UserError: with the reason.
    """
    family, what = model.family, f"{model.family.model_type} keeps all dimensions of its residual stream"
    begins = family.residual is not None and bool(family.residual.projections or family.residual.tokens)
    if family.residual is None or (family.unrotatable is not None and not begins):
        raise UserError(f"{what}: {family.unrotatable or 'what reads and writes it is not described'}")
    if begins and kind == "per-block":
        raise UserError(
            f"{what}: it begins in a convolution and tokens of its own, which the code of kind: per-block has no place "
            "for: say --set hidden.kind=shared"
        )
    if kind == "shared" and (family.head is None or not family.gives_logits):
        raise UserError(
            f"{what} without a vocabulary head ({family.architecture}): what reads its output would have to follow; "
            "kind: per-block gives it back at its width"
        )
    for refusal in family.residual.refused:
        concerned = refusal.kind is None or (refusal.kind == "shared" and kind == "shared")
        if concerned and refusal.holds(model.config, model.dimension):
            raise UserError(f"{what}: {refusal.why}")


@dataclass(frozen=True)
class SlicedCheckpoint(AbsorbedCheckpoint):
    """What `Checkpoint` is to a job whose residual stream has lost dimensions.

    Args:
        model: the dense model.
        kind: per-block: every sub-layer reads the stream in a basis of its own, and matrices on the skip connections
            take it from one to the next; embedding, final norm and head stay as they are. shared: one basis, absorbed
            by whatever reads and writes the stream.
        kept: k, dimensions that stay.
        bases: of a block.
        untied: of a shared one, whether a tied head becomes a table of its own.
        embedding_scale: what the stock class of the output multiplies its embedding by, as a share of what the dense
            one does (gemma's follows from the width).
        device: where tensors absorb bases.
    """

    model: Model
    kind: SlicingKind
    kept: int
    bases: Bases = not_measured
    untied: bool = False
    embedding_scale: float = 1.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    room: ClassVar[str] = "it does not fit its dtype {dtype}: start from a bfloat16 or float32 copy of the model"

    # ---- shapes, before any basis is known -------------------------------------------------------------------

    @cached_property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """Of every block."""
        return sublayers(self.model)

    @cached_property
    def width(self) -> int:
        """d, dimensions of the dense stream."""
        return self.model.dimension("hidden")

    @property
    def scale(self) -> float:
        """C."""
        return stream_scale(self.kept, self.width)

    @property
    def shared(self) -> bool:
        """Whether one basis serves all blocks."""
        return self.kind == "shared"

    @cached_property
    def keeps_tie(self) -> bool:
        """Whether one table stays embedding and head."""
        return self.shared and self.model.tied and not self.untied

    @cached_property
    def added(self) -> Added:
        """Tensors of another shape than the source's, and those it has not (`rotated.Added`)."""
        found: Added = {}
        for block in range(self.model.blocks):
            found |= self._of_block(block)
        if self.shared:
            for name, axis in self.starts.items():
                shape = list(self.source.tensors[name].shape)
                shape[axis] = self.kept
                found[name] = (name, tuple(shape))
            found |= {name: (name, (self.kept,)) for name in self._final}
            if self._head in self.source.tensors or not self.keeps_tie:
                found[self._head] = (self._table, (self.source.tensors[self._table].shape[0], self.kept))
        return found

    def _of_block(self, block: int) -> Added:
        found: Added = {}
        last = block == self.model.blocks - 1
        tensors = self.source.tensors

        def named(module: str) -> dict[str, tuple[int, ...]]:
            names = {self.family.tensor(block, module, kind) for kind in KINDS}
            return {name: tensors[name].shape for name in names if name in tensors}

        for place, own in enumerate(self.sublayers):
            ends = last and own is self.sublayers[-1] and not self.shared
            out = self.width if ends else self.kept
            for norm in own.norms:
                found |= {name: (name, (self.kept if self.shared else 1,)) for name in named(norm)}
            for module in own.reads:
                found |= {n: (n, (s[0], self.kept)) for n, s in named(module).items() if len(s) == 2}
            for module in own.writes:
                found |= {n: (n, (out, *s[1:])) for n, s in named(module).items()}
            if not self.shared:
                found[self.family.tensor(block, SKIPS[place])] = (self._value(block), (out, self.kept))
        if block == 0 and not self.shared:
            found[self.family.tensor(0, ENTRY)] = (self._value(0), (self.kept, self.width))
        return found

    def config_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """The output's config.json with what the bases change in it.

        Args:
            values: of a container of the width that blocks have.
        """
        if self.shared:
            return values if self.keeps_tie or not self.model.tied else values | {"tie_word_embeddings": False}
        paths = module_paths(self.family)

        def lie(modules: Iterable[str]) -> list[str]:
            return [path for module in modules for path in paths.get(module) or (module,)]

        consumers = self.family.consumers.values()
        multipliers = {space.multiplier for space in consumers if space.multiplier is not None}
        slicing = Slicing(
            width=self.kept,
            blocks=self.model.blocks,
            sublayers=[
                {"norms": lie(own.norms), "reads": lie(own.reads), "writes": lie(own.writes)} for own in self.sublayers
            ],
            multiplier=next(iter(multipliers), None),
        )
        return values | {SLICING_KEY: slicing}

    @property
    def biases(self) -> frozenset[str]:
        """Linear modules of a block that have a bias in the output."""
        return frozenset(m for m in self.model.family.linears if self.model.has(m, "bias")) | self.added_biases

    def seen(self, states: Tensor) -> Tensor:
        """What a stream in one basis has of the dense one, (tokens, d) float64: (tokens, k)."""
        basis = self.bases(0)[0].to(states)
        layer = residual_of(self.family).norm == "layer"
        return self.scale * ((subtract_mean(states.T).T if layer else states) @ basis)

    # ---- tensors ---------------------------------------------------------------------------------------------

    def block(self, index: int) -> dict[str, Tensor]:
        """The tensors of block `index`, bases absorbed in float64, in the dtype of the source."""
        family = self.family
        tensors = {name: tensor.to(self.device) for name, tensor in self.model.read_block(index).items()}
        found = fuse_norms(family, index, tensors)
        own = [basis.to(self.device) for basis in self.bases(index)]
        behind: Tensor | None = own[0]
        if not self.shared:
            last = index == self.model.blocks - 1
            behind = None if last else self.bases(index + 1)[0].to(self.device)
        for place, sublayer in enumerate(self.sublayers):
            basis = own[place]
            leaves = own[place + 1] if place + 1 < len(own) else behind
            for norm in sublayer.norms:
                found |= self._plain(index, norm, found)
            for module in sublayer.reads:
                name = family.tensor(index, module)
                found[name] = slice_reader(found[name], basis, self.scale)
            for module in sublayer.writes:
                for name in (family.tensor(index, module, kind) for kind in KINDS):
                    if name in found and leaves is not None:
                        found[name] = slice_writer(found[name], leaves, self.scale)
            if not self.shared:
                # The last block gives the stream back as it was: nothing is sliced behind it.
                skip = basis / self.scale if leaves is None else leaves.T @ basis
                found[family.tensor(index, SKIPS[place])] = skip
        if index == 0 and not self.shared:
            entry = self.scale * own[0].T
            layer = residual_of(family).norm == "layer"
            found[family.tensor(0, ENTRY)] = entry - entry.mean(1, keepdim=True) if layer else entry
        return self._stored(index, found)

    def _plain(self, block: int, norm: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A norm without gains: of the new width, or one number that stands for them in remote code."""
        names = {self.family.tensor(block, norm, kind): kind for kind in KINDS}
        held = {name: kind for name, kind in names.items() if name in tensors}
        if self.shared:
            return {name: tensors[name][: self.kept] for name in held}
        return {name: torch.full_like(tensors[name][:1], kind == "weight") for name, kind in held.items()}

    def _outside(self, name: str) -> Tensor:
        if not self.shared or not (name in self.starts or name in self._final or name == self._head):
            return self.source.read([name])[name]
        basis = self.bases(0)[0].to(self.device)
        if name in self.starts:
            return self._started(name, basis * (self.scale / self.embedding_scale))
        if name == self._head:
            return self._read_last(basis / self.scale)
        if self._final[name] == "bias":
            return self._final_shift(self.scale * basis)
        stored = self.source.read([name])[name]
        if not self.keeps_tie:
            return unit_gains(self.family, stored[: self.kept])
        # A table that is embedding and head at once leaves the gains behind the norm.
        gain = self._gain
        inner = (basis * (basis if gain is None else gain[:, None] * basis)).sum(0)
        own = inner * self.embedding_scale / self.scale**2 - self.family.norm_offset
        return own.to(stored.dtype).cpu()


def tied_basis(model: Model, basis: Tensor) -> Tensor:
    """A shared basis in which a tied table stays one (`slicing.diagonalising`).

    Args:
        model: the dense model, its norms RMSNorms.
        basis: P, (d, k) float64.
    """
    final = f"{model.family.on_disk(residual_of(model.family).final)}.weight"
    gain = (
        norm_gains(model.family, model.checkpoint.read([final])[final]) if final in model.checkpoint.tensors else None
    )
    return basis if gain is None else diagonalise_gains(basis, gain.to(basis))[0]
