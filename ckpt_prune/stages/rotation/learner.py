"""Learn a model's rotations, block by block, and keep them in a file of the output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import read_tensors
from ckpt_prune.checkpoint.disk_space import check_free_space
from ckpt_prune.checkpoint.scratch import hidden_folder
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.common.progress import Meter, meter
from ckpt_prune.measure.moment_sources import MomentSource
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.measure.streams.outside import ReadTensors
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model, TensorSpec
from ckpt_prune.recipe.names import Backbone, RotationKind
from ckpt_prune.stages.rotation.absorbing import fuse_norms, residual_of, rotated_sides, undo_norm, value_lines
from ckpt_prune.stages.rotation.descent import (
    LearnedRotations,
    RotationProblem,
    learn_rotations,
    learn_shared_rotation,
)
from ckpt_prune.stages.rotation.importance import Side, Term, importance, importance_map, sensitivity
from ckpt_prune.stages.rotation.keys import Rotation
from ckpt_prune.stages.rotation.rotated_checkpoint import BlockRotations

_SHARED = "residual"
_KEPT_BYTES = 2**30
"""Terms of all blocks together up to this size stay in memory while one R1 is learned for all."""
_CURVE = 50
"""Distances between the steps of a curve that is kept, at most."""


@dataclass(frozen=True)
class RotationSizes:
    """Sizes of a model's rotations.

    Attributes:
        hidden: width of the residual stream.
        kv_heads, head_dim: of the values.
    """

    kind: RotationKind
    blocks: int
    hidden: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, kind: RotationKind, model: Model) -> "RotationSizes":
        return cls(kind, *map(model.dimension, ("layers", "hidden", "kv_heads", "head_dim")))

    def residual_name(self, block: int) -> str | None:
        if self.kind == "values":
            return None
        return _SHARED if self.kind == "shared" else f"blocks.{block}.residual"

    def heads_name(self, block: int) -> str:
        return f"blocks.{block}.heads"

    @property
    def layout(self) -> dict[str, TensorSpec]:
        """Name → dtype and shape of every rotation."""
        layout: dict[str, TensorSpec] = {}
        for block in range(self.blocks):
            residual = self.residual_name(block)
            if residual is not None:
                layout[residual] = (torch.float32, (self.hidden, self.hidden))
            layout[self.heads_name(block)] = (torch.float32, (self.kv_heads, self.head_dim, self.head_dim))
        return layout


@dataclass(frozen=True)
class WrittenRotations:
    """Rotations read from a file, so that a resumed run, and recovery, see the same bits."""

    read: ReadTensors
    sizes: RotationSizes

    @classmethod
    def of_output(cls, folder: Path, sizes: RotationSizes) -> "WrittenRotations":
        """Open the rotations of a finished output; refuse a file that is missing, or of other sizes."""
        path = folder / ROTATIONS
        if not path.is_file():
            raise UserError(f"{path} is not there, which says how the pruned model is rotated: restore the file")
        stored = read_header(path).tensors
        for name, (_, shape) in sizes.layout.items():
            if name not in stored or stored[name].shape != shape:
                raise UserError(f"{path} has no {name} of shape {list(shape)}: it belongs to another model")
        return cls(lambda names: read_tensors(folder, [stored[name] for name in names]), sizes)

    def __call__(self, block: int) -> BlockRotations:
        residual = self.sizes.residual_name(block)
        names = [self.sizes.heads_name(block)] + ([residual] if residual else [])
        rotations = self.read(names)
        return rotations[residual].double() if residual else None, rotations[names[0]].double()


@dataclass(frozen=True)
class Learner:
    """Learns the rotations of one dense model (stages/rotation/README.md, section 4).

    Args:
        groups: M of the mask's N:M pattern if importance is concentrated inside its groups; else None.
        samples: how many the moments are of.
        choose: importance of a weight (rows, columns), float64 → those that a mask by it keeps, for a histogram.
        source: learner → source of the dense model's moments, of every linear's input and with the Grams of `grams`.
    """

    model: Model
    recipe: Rotation
    backbone: Backbone
    groups: int | None
    samples: int
    choose: Callable[[Tensor], Tensor]
    source: Callable[["Learner"], MomentSource]
    device: torch.device

    @property
    def family(self) -> Family:
        """The model's description."""
        return self.model.family

    @property
    def sizes(self) -> RotationSizes:
        return RotationSizes.of(self.recipe.kind, self.model)

    @property
    def turns_stream(self) -> bool:
        """Whether there is an R1."""
        return self.recipe.kind != "values"

    @property
    def problem(self) -> RotationProblem:
        """Which rotations are learned. If a LayerNorm subtracts the mean, every R1 keeps the direction of ones."""
        sizes, preserve = self.sizes, None
        if self.turns_stream and residual_of(self.family).norm != "rms":
            preserve = torch.full((sizes.hidden,), sizes.hidden**-0.5, dtype=torch.float64)
        return RotationProblem(
            self.backbone,
            hidden=sizes.hidden if self.turns_stream else None,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            device=self.device,
            dtype=getattr(torch, self.recipe.compute_dtype),
            groups=self.groups,
            preserve=preserve,
        )

    def run(self, writer: CheckpointWriter) -> list[dict[str, Any]]:
        """Learn what a resumed run has not learned, and write it.

        Returns entropies before and after in nats, and steps: one entry per block, or one for all if they share R1.

        Args:
            writer: its layout has `RotationSizes.layout`. Temporary files are made in its scratch folder.
        """
        return self._learn_shared(writer) if self.recipe.kind == "shared" else self._learn_blocks(writer)

    # ---- a rotation for every block ---------------------------------------------------------------------------

    def _learn_blocks(self, writer: CheckpointWriter) -> list[dict[str, Any]]:
        sizes = self.sizes
        units = [journal_entry(block) for block in range(sizes.blocks)]
        if writer.done.issuperset(units):
            return [writer.notes[unit] for unit in units]
        source = self.source(self)
        with meter(sizes.blocks * self.recipe.steps, "learning rotations") as advance:
            for block, unit in enumerate(units):
                tensors = self.read(block)
                if unit not in writer.done:
                    inputs = self.inputs(block, tensors, self.moments(source, block, tensors))
                    self.learn(block, self.weights(block, tensors, inputs), writer, advance)
                advance.to((block + 1) * self.recipe.steps)
                source.advance(block, tensors)
        return [writer.notes[unit] for unit in units]

    def learn(self, block: int, terms: list[Term], writer: CheckpointWriter, advance: Meter) -> None:
        """Learn the rotations of one block from its linears as rotations see them, and write them."""
        sizes = self.sizes
        learned = learn_rotations(terms, self.problem, self.recipe, advance.step)
        residual = sizes.residual_name(block)
        if residual is not None:
            assert learned.residual is not None
            writer.write(residual, learned.residual.float())
        assert isinstance(learned.heads, Tensor)
        writer.write(sizes.heads_name(block), learned.heads.float())
        importance_note = self._map(terms, learned.residual, learned.heads) if block == 0 else {}
        writer.commit(journal_entry(block), note={"block": block, **_figures(learned), **importance_note})

    def _map(self, terms: Sequence[Term], residual: Tensor | None, heads: Tensor) -> dict[str, Any]:
        """Map the importance of the first block's output projection, before and after; empty if nothing turns it."""
        name = self.family.tensor(0, self.family.attention.output)
        term = next((term for term in terms if term.name == name), None)
        if term is None:
            return {}
        weight, inputs, r1, r2 = (
            None if tensor is None else tensor.to(self.device, torch.float32)
            for tensor in (term.weight, term.inputs, residual, heads)
        )
        assert weight is not None
        term = replace(term, weight=weight, inputs=inputs)
        before, after = importance(term, self.backbone, None, None), importance(term, self.backbone, r1, r2)
        return {"map": importance_map(name, before, after, self.choose)}

    # ---- one rotation for all blocks --------------------------------------------------------------------------

    def _learn_shared(self, writer: CheckpointWriter) -> list[dict[str, Any]]:
        unit, sizes = "rotations", self.sizes
        if unit not in writer.done:
            with (
                self._prepare_terms(writer.scratch) as terms_of,
                meter(self.recipe.steps, "learning one rotation") as advance,
            ):
                learned = learn_shared_rotation(sizes.blocks, terms_of, self.problem, self.recipe, advance.step)
                assert learned.heads is not None
                importance_note = self._map(terms_of(0), learned.residual, learned.heads[0])
            assert learned.residual is not None
            writer.write(_SHARED, learned.residual.float())
            for block in range(sizes.blocks):
                writer.write(sizes.heads_name(block), learned.heads[block].float())
            writer.commit(unit, note={"block": None, **_figures(learned), **importance_note})
        return [writer.notes[unit]]

    @contextmanager
    def _prepare_terms(self, scratch: Path) -> Iterator["_Terms"]:
        """Provide the terms of every block: in memory if they are small, else read again on every call."""
        sizes = self.sizes
        weights = sum(
            self.model.checkpoint.tensors[self.family.tensor(block, module)].numel
            for block in range(sizes.blocks)
            for module in self.family.linears
        )
        queries = self.model.dimension("query_heads") * sizes.head_dim
        inputs = 0 if self.backbone == "magnitude" else sizes.blocks * (2 * sizes.hidden**2 + queries**2)
        keep = 4 * (weights + inputs) <= _KEPT_BYTES
        with disk_failures(scratch):
            scratch.mkdir(exist_ok=True)
            if not keep:
                check_free_space(scratch, 4 * inputs)
        with hidden_folder(scratch, "ckpt-prune-rotation") as folder:
            yield _Terms(self, folder, keep)

    # ---- terms ------------------------------------------------------------------------------------------------

    def read(self, block: int) -> dict[str, Tensor]:
        return self.model.read_block(block)

    def moments(self, source: MomentSource, block: int, tensors: Mapping[str, Tensor]) -> dict[str, SpaceMoments]:
        """Return the moments of a block that the backbone needs, if it needs any."""
        return source.moments(block, tensors, list(self.family.inputs)) if self.backbone != "magnitude" else {}

    def inputs(
        self, block: int, tensors: Mapping[str, Tensor], moments_of: Mapping[str, SpaceMoments]
    ) -> dict[str, Tensor]:
        """Make `Term.inputs` of each linear, by module, float32 (`importance.sensitivity`).

        Linears that read the same input share one tensor, under the name of the first.
        """
        inputs: dict[str, Tensor] = {}
        for first in self.family.inputs if self.backbone != "magnitude" else []:
            folds = select_input_moments(moments_of[first])
            _, right = rotated_sides(self.family, first, residual=self.turns_stream)
            if not self._needs_gram(right):
                square = sum_folds(folds).square
                inputs[first] = (square / square.mean().clamp_min(torch.finfo(square.dtype).tiny)).float()
                continue
            moments = sum_folds(folds).to(self.device)
            if self.turns_stream:
                moments = undo_norm(self.family, block, first, tensors, moments)
            assert moments.gram is not None
            name = self.family.tensor(block, first)
            released = self.samples if self.recipe.damped == "inverse-too" else None
            sensitivities = sensitivity(
                moments.gram, self.backbone, right is not None, self.recipe.damp, released=released, name=name
            )
            assert sensitivities is not None
            # An inverse comes column by column.
            inputs[first] = sensitivities.float().cpu().contiguous()
        return inputs

    def _needs_gram(self, right: Side | None) -> bool:
        return self.backbone == "sparsegpt" or right is not None

    @property
    def grams(self) -> dict[str, bool]:
        """For every linear module that is first to read its input, whether the Gram is needed."""
        return {
            first: self._needs_gram(rotated_sides(self.family, first, residual=self.turns_stream)[1])
            for first in self.family.inputs
        }

    def weights(self, block: int, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> list[Term]:
        """Return the block's linears as rotations see them, float32."""
        block_tensors = fuse_norms(self.family, block, tensors) if self.turns_stream else tensors
        terms = []
        for first, modules in self.family.inputs.items():
            for module in modules:
                left, right = rotated_sides(self.family, module, residual=self.turns_stream)
                if left is not None or right is not None:
                    name = self.family.tensor(block, module)
                    for part, side in self._parts(block, module, block_tensors, left):
                        if side is not None or right is not None:
                            terms.append(Term(name, part.float(), inputs.get(first), side, right))
        return terms

    def _parts(
        self, block: int, module: str, tensors: Mapping[str, Tensor], left: Side | None
    ) -> list[tuple[Tensor, Side | None]]:
        """Return parts of a weight and the side of their rows: values, and what else their module makes, are two."""
        weight = tensors[self.family.tensor(block, module)]
        if left != "heads" or self.family.attention.values is None:
            return [(weight, left)]
        lines = value_lines(self.family, block, tensors, self.model.dimension("kv_heads")).to(weight.device)
        others = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
        others[lines] = False
        return [(weight[others], None), (weight[lines], left)]


class _Terms:
    """Terms of any block, as often as asked for.

    `folder` keeps inputs, which are costly to make, unless terms stay in memory (`keep`).
    """

    def __init__(self, learner: Learner, folder: Path, keep: bool) -> None:
        self._learner, self._folder, self._keep = learner, folder, keep
        self._source = learner.source(learner)
        self._kept: dict[int, list[Term]] = {}

    def __call__(self, block: int) -> list[Term]:
        if block in self._kept:
            return self._kept[block]
        learner = self._learner
        tensors = learner.read(block)
        file = self._folder / f"block-{block:05d}.safetensors"
        if not file.exists():
            inputs = learner.inputs(block, tensors, learner.moments(self._source, block, tensors))
            if not self._keep:
                save_file(inputs, file)
        else:
            inputs = load_file(file)
        terms = learner.weights(block, tensors, inputs)
        if self._keep:
            self._kept[block] = terms
        return terms


def journal_entry(block: int) -> str:
    """Return the entry of the journal that holds a block's rotations."""
    return f"rotation {block}"


def _figures(learned: LearnedRotations) -> dict[str, Any]:
    return {
        "entropy_before": learned.entropy_before,
        "entropy_after": learned.entropy_after,
        "steps": learned.steps,
        "curve": _thin_out(learned.curve),
    }


def _thin_out(curve: list[float]) -> list[tuple[int, float | None]]:
    """Thin out a curve: the first step, the last, and others at even distances; no more than fit."""
    stride = max(1, -(-(len(curve) - 1) // _CURVE))
    steps = sorted({*range(0, len(curve), stride), len(curve) - 1} - {-1})
    return [(step, curve[step] if isfinite(curve[step]) else None) for step in steps]
