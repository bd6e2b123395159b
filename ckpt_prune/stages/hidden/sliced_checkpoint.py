"""Checkpoint in bases of its residual stream that have fewer dimensions, absorbed as its tensors are read."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.layout import Added
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.model import Model
from ckpt_prune.model.sublayers import Sublayer, list_sublayers
from ckpt_prune.recipe.names import SlicingKind
from ckpt_prune.stages.hidden.bases import diagonalise_gains, slice_reader, slice_writer, stream_scale
from ckpt_prune.stages.rotation.absorbing import fuse_norms, norm_gains, residual_of, subtract_mean, unit_gains
from ckpt_prune.stages.rotation.rotated_checkpoint import AbsorbedCheckpoint

Bases = Callable[[int], tuple[Tensor, ...]]
"""The basis (d, k) that each sub-layer of a block reads the stream in; of a shared one, the same everywhere."""
SLICING_KEY = "ckpt_prune_slicing"
ENTRY = "entry_slice"
"""Module that brings the dense stream into the basis of the first block, in `modeling_pruned`."""


def not_measured(_block: int) -> tuple[Tensor, ...]:
    """Stand in for bases if only names and shapes are needed."""
    raise ValueError("the bases are not measured yet")


def check_sliceable(model: Model, kind: SlicingKind) -> None:
    """Refuse to slice a model whose residual stream no basis passes through, with the reason."""
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
    """Stands in for a `Checkpoint` in a job whose residual stream has lost dimensions.

    Args:
        kind: per-block: every sub-layer reads the stream in a basis of its own, and matrices on the skip connections
            take it from one to the next; embedding, final norm and head stay as they are. shared: one basis, absorbed
            by whatever reads and writes the stream.
        untied: whether a tied head becomes a table of its own, if the basis is shared.
        embedding_scale: what the stock class of the output multiplies its embedding by, as a share of what the dense
            one does (gemma's follows from the width).
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
        """Sub-layers of every block."""
        return list_sublayers(self.model)

    @cached_property
    def width(self) -> int:
        """d, dimensions of the dense stream."""
        return self.model.dimension("hidden")

    @property
    def scale(self) -> float:
        """C (`bases.stream_scale`)."""
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
        """Tensors that the source lacks, or has in another shape (`AbsorbedCheckpoint.added`)."""
        added: Added = {}
        for block in range(self.model.blocks):
            added |= self._of_block(block)
        if self.shared:
            for name, axis in self.starts.items():
                shape = list(self.source.tensors[name].shape)
                shape[axis] = self.kept
                added[name] = (name, tuple(shape))
            added |= {name: (name, (self.kept,)) for name in self._final}
            if self._head in self.source.tensors or not self.keeps_tie:
                added[self._head] = (self._table, (self.source.tensors[self._table].shape[0], self.kept))
        return added

    def _of_block(self, block: int) -> Added:
        from ckpt_prune.modeling_pruned import SKIPS

        shapes: Added = {}
        last = block == self.model.blocks - 1
        tensors = self.source.tensors

        def shapes_of(module: str) -> dict[str, tuple[int, ...]]:
            names = {self.family.tensor(block, module, kind) for kind in KINDS}
            return {name: tensors[name].shape for name in names if name in tensors}

        for place, sublayer in enumerate(self.sublayers):
            is_end = last and sublayer is self.sublayers[-1] and not self.shared
            out = self.width if is_end else self.kept
            for norm in sublayer.norms:
                shapes |= {name: (name, (self.kept if self.shared else 1,)) for name in shapes_of(norm)}
            for module in sublayer.reads:
                shapes |= {n: (n, (s[0], self.kept)) for n, s in shapes_of(module).items() if len(s) == 2}
            for module in sublayer.writes:
                shapes |= {n: (n, (out, *s[1:])) for n, s in shapes_of(module).items()}
            if not self.shared:
                shapes[self.family.tensor(block, SKIPS[place])] = (self._value(block), (out, self.kept))
        if block == 0 and not self.shared:
            shapes[self.family.tensor(0, ENTRY)] = (self._value(0), (self.kept, self.width))
        return shapes

    def config_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the output's config.json, made from that of a container of the new width."""
        if self.shared:
            return values if self.keeps_tie or not self.model.tied else values | {"tie_word_embeddings": False}
        paths = module_paths(self.family)

        def paths_of(modules: Iterable[str]) -> list[str]:
            return [path for module in modules for path in paths.get(module) or (module,)]

        consumers = self.family.consumers.values()
        multipliers = {space.multiplier for space in consumers if space.multiplier is not None}
        from ckpt_prune.modeling_pruned import Slicing

        slicing = Slicing(
            width=self.kept,
            blocks=self.model.blocks,
            sublayers=[
                {
                    "norms": paths_of(sublayer.norms),
                    "reads": paths_of(sublayer.reads),
                    "writes": paths_of(sublayer.writes),
                }
                for sublayer in self.sublayers
            ],
            multiplier=next(iter(multipliers), None),
        )
        return values | {SLICING_KEY: slicing}

    @property
    def biases(self) -> frozenset[str]:
        """Linear modules of a block that have a bias in the output."""
        return self.model.biased | self.added_biases

    def project(self, states: Tensor) -> Tensor:
        """Project the dense stream, (tokens, d) float64, into the shared basis: (tokens, k)."""
        basis = self.bases(0)[0].to(states)
        layer = residual_of(self.family).norm == "layer"
        return self.scale * ((subtract_mean(states.T).T if layer else states) @ basis)

    # ---- tensors ---------------------------------------------------------------------------------------------

    def block(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of block `index`, bases absorbed in float64, in the dtype of the source."""
        from ckpt_prune.modeling_pruned import SKIPS

        family = self.family
        tensors = {name: tensor.to(self.device) for name, tensor in self.model.read_block(index).items()}
        sliced = fuse_norms(family, index, tensors)
        bases = [basis.to(self.device) for basis in self.bases(index)]
        next_basis: Tensor | None = bases[0]
        if not self.shared:
            last = index == self.model.blocks - 1
            next_basis = None if last else self.bases(index + 1)[0].to(self.device)
        for place, sublayer in enumerate(self.sublayers):
            basis = bases[place]
            writer_basis = bases[place + 1] if place + 1 < len(bases) else next_basis
            for norm in sublayer.norms:
                sliced |= self._plain(index, norm, sliced)
            for module in sublayer.reads:
                name = family.tensor(index, module)
                sliced[name] = slice_reader(sliced[name], basis, self.scale)
            for module in sublayer.writes:
                for name in (family.tensor(index, module, kind) for kind in KINDS):
                    if name in sliced and writer_basis is not None:
                        sliced[name] = slice_writer(sliced[name], writer_basis, self.scale)
            if not self.shared:
                # The last block gives the stream back as it was: nothing is sliced behind it.
                skip = basis / self.scale if writer_basis is None else writer_basis.T @ basis
                sliced[family.tensor(index, SKIPS[place])] = skip
        if index == 0 and not self.shared:
            entry = self.scale * bases[0].T
            layer = residual_of(family).norm == "layer"
            sliced[family.tensor(0, ENTRY)] = entry - entry.mean(1, keepdim=True) if layer else entry
        return self._to_stored(index, sliced)

    def _plain(self, block: int, norm: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a norm without gains: of the new width, or one number that stands for them in remote code."""
        names = {self.family.tensor(block, norm, kind): kind for kind in KINDS}
        stored = {name: kind for name, kind in names.items() if name in tensors}
        if self.shared:
            return {name: tensors[name][: self.kept] for name in stored}
        return {name: torch.full_like(tensors[name][:1], kind == "weight") for name, kind in stored.items()}

    def _outside(self, name: str) -> Tensor:
        if not self.shared or not (name in self.starts or name in self._final or name == self._head):
            return self.source.read([name])[name]
        basis = self.bases(0)[0].to(self.device)
        if name in self.starts:
            return self._absorb_start(name, basis * (self.scale / self.embedding_scale))
        if name == self._head:
            return self._absorb_in_head(basis / self.scale)
        if self._final[name] == "bias":
            return self._final_shift(self.scale * basis)
        stored = self.source.read([name])[name]
        if not self.keeps_tie:
            return unit_gains(self.family, stored[: self.kept])
        # A table that is embedding and head at once leaves the gains behind the norm.
        gain = self._gain
        inner = (basis * (basis if gain is None else gain[:, None] * basis)).sum(0)
        kept_gains = inner * self.embedding_scale / self.scale**2 - self.family.norm_offset
        return kept_gains.to(stored.dtype).cpu()


def tied_basis(model: Model, basis: Tensor) -> Tensor:
    """Return a shared basis P (d, k) float64 in which a tied table stays one (`bases.diagonalise_gains`).

    The norms of the dense model are RMSNorms.
    """
    final = f"{model.family.on_disk(residual_of(model.family).final)}.weight"
    gain = (
        norm_gains(model.family, model.checkpoint.read([final])[final]) if final in model.checkpoint.tensors else None
    )
    return basis if gain is None else diagonalise_gains(basis, gain.to(basis))[0]
