"""Learning a model's rotations, block by block, and keeping them beside the output."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt_prune.architectures.family import Family
from ckpt_prune.architectures.model import Model, Shape
from ckpt_prune.checkpoint.checkpoint import read_tensors
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.checkpoint.writer import CheckpointWriter, check_free_space
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.common.progress import Meter, meter
from ckpt_prune.job.names import Backbone, RotationKind
from ckpt_prune.measure.moment_sources import MomentSource
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.measure.streams.modules import ReadTensors
from ckpt_prune.stages.rotation.absorbing import fuse_norms, residual_of, rotated_sides, undo_norm, value_lines
from ckpt_prune.stages.rotation.descent import DescentSettings, LearnedRotations, learn_rotations, learn_shared_rotation
from ckpt_prune.stages.rotation.importance import Side, Term, importance, sensitivity
from ckpt_prune.stages.rotation.importance_map import importance_map
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
        kind: of the recipe's rotation.
        blocks: how many.
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
        """The sizes of a model's rotations."""
        return cls(kind, *map(model.dimension, ("layers", "hidden", "kv_heads", "head_dim")))

    def residual_name(self, block: int) -> str | None:
        """Name of a block's R1; None where there is none."""
        if self.kind == "values":
            return None
        return _SHARED if self.kind == "shared" else f"blocks.{block}.residual"

    def heads_name(self, block: int) -> str:
        """Name of a block's R2."""
        return f"blocks.{block}.heads"

    @property
    def layout(self) -> dict[str, Shape]:
        """Name → dtype and shape of every rotation."""
        found: dict[str, Shape] = {}
        for block in range(self.blocks):
            residual = self.residual_name(block)
            if residual is not None:
                found[residual] = (torch.float32, (self.hidden, self.hidden))
            found[self.heads_name(block)] = (torch.float32, (self.kv_heads, self.head_dim, self.head_dim))
        return found


@dataclass(frozen=True)
class WrittenRotations:
    """Rotations as they stand in a file: a resumed run, and recovery, see the same bits.

    Args:
        read: reads them by name.
        sizes: of the rotations.
    """

    read: ReadTensors
    sizes: RotationSizes

    @classmethod
    def of_output(cls, folder: Path, sizes: RotationSizes) -> "WrittenRotations":
        """Those that a finished output keeps.

        Raises:
            UserError: the file is not there, not readable, or of other sizes.
        """
        path = folder / ROTATIONS
        if not path.is_file():
            raise UserError(f"{path} is not there, which says how the pruned model is rotated: restore the file")
        found = read_header(path).tensors
        for name, (_, shape) in sizes.layout.items():
            if name not in found or found[name].shape != shape:
                raise UserError(f"{path} has no {name} of shape {list(shape)}: it belongs to another model")
        return cls(lambda names: read_tensors(folder, [found[name] for name in names]), sizes)

    def __call__(self, block: int) -> BlockRotations:
        """R1 and R2 of a block, float64."""
        residual = self.sizes.residual_name(block)
        names = [self.sizes.heads_name(block)] + ([residual] if residual else [])
        found = self.read(names)
        return found[residual].double() if residual else None, found[names[0]].double()


@dataclass(frozen=True)
class Learner:
    """Learns the rotations of one dense model (rotations/README.md, section 4; DenoiseRotator, Algorithm 1).

    Args:
        model: the dense model.
        recipe: how.
        backbone: whose importance is concentrated.
        groups: M of the mask's N:M pattern, where it is concentrated inside its groups; else None.
        source: makes what hands out the dense model's moments to a learner, of every linear's input and with the Grams
            of `grams`.
        device: where.
    """

    model: Model
    recipe: Any
    backbone: Backbone
    groups: int | None
    source: Callable[["Learner"], MomentSource]
    device: torch.device

    @property
    def family(self) -> Family:
        """The model's description."""
        return self.model.family

    @property
    def sizes(self) -> RotationSizes:
        """The sizes of the rotations."""
        return RotationSizes.of(self.recipe.kind, self.model)

    @property
    def training(self) -> DescentSettings:
        """The optimiser's settings."""
        recipe = self.recipe
        return DescentSettings(
            steps=recipe.steps,
            learning_rate=recipe.learning_rate,
            method=recipe.retraction,
            patience=recipe.patience,
            tolerance=recipe.tolerance,
            jitter=recipe.jitter,
            seed=recipe.seed,
        )

    @property
    def turns_stream(self) -> bool:
        """Whether there is an R1."""
        return bool(self.recipe.kind != "values")

    @property
    def preserved(self) -> Tensor | None:
        """The direction that every R1 keeps: that of ones, where a LayerNorm subtracts the mean."""
        if not self.turns_stream or residual_of(self.family).norm == "rms":
            return None
        hidden = self.sizes.hidden
        return torch.full((hidden,), hidden**-0.5, dtype=torch.float64)

    @property
    def _options(self) -> dict[str, Any]:
        """How rotations are learned, of one block or of all together."""
        return {
            "kv_heads": self.sizes.kv_heads,
            "head_dim": self.sizes.head_dim,
            "training": self.training,
            "device": self.device,
            "dtype": getattr(torch, self.recipe.compute_dtype),
            "groups": self.groups,
            "preserve": self.preserved,
        }

    def run(self, writer: CheckpointWriter) -> list[dict[str, Any]]:
        """Learn what a resumed run has not, and write it.

        Args:
            writer: its layout has `RotationSizes.layout`. Temporary files are made in its scratch folder.

        Returns:
            What was learned, one entry per block, or one for all where they share R1: entropy before and after in
            nats, steps.
        """
        return self._shared(writer) if self.recipe.kind == "shared" else self._blocks(writer)

    # ---- a rotation for every block ---------------------------------------------------------------------------

    def _blocks(self, writer: CheckpointWriter) -> list[dict[str, Any]]:
        sizes = self.sizes
        units = [journal_entry(block) for block in range(sizes.blocks)]
        if writer.done.issuperset(units):
            return [writer.notes[unit] for unit in units]
        source = self.source(self)
        with meter(sizes.blocks * self.recipe.steps, "learning rotations") as advance:
            for block, unit in enumerate(units):
                tensors = self.read(block)
                if unit not in writer.done:
                    self.learn(block, self.terms(block, tensors, self.moments(source, block, tensors)), writer, advance)
                advance.to((block + 1) * self.recipe.steps)
                source.advance(block, tensors)
        return [writer.notes[unit] for unit in units]

    def learn(self, block: int, terms: list[Term], writer: CheckpointWriter, advance: Meter) -> None:
        """Learn the rotations of one block, and write them.

        Args:
            block: its index.
            terms: its linears as rotations see them.
            writer: as `run` takes it.
            advance: shows the steps.
        """
        sizes = self.sizes
        hidden = sizes.hidden if self.turns_stream else None
        learned = learn_rotations(terms, self.backbone, hidden=hidden, progress=advance.step, **self._options)
        residual = sizes.residual_name(block)
        if residual is not None:
            assert learned.residual is not None
            writer.write(residual, learned.residual.float())
        assert isinstance(learned.heads, Tensor)
        writer.write(sizes.heads_name(block), learned.heads.float())
        seen = self._map(terms, learned.residual, learned.heads) if block == 0 else {}
        writer.commit(journal_entry(block), note={"block": block, **_figures(learned), **seen})

    def _map(self, terms: Sequence[Term], residual: Tensor | None, heads: Tensor) -> dict[str, Any]:
        """The importance of the first block's output projection, before and after; nothing where nothing turns it.

        Args:
            terms: the first block's linears.
            residual: R1, or None.
            heads: R2 of the block.
        """
        name = self.family.tensor(0, self.family.attention.output)
        own = next((term for term in terms if term.name == name), None)
        if own is None:
            return {}
        weight, inputs, one, two = (
            None if each is None else each.to(self.device, torch.float32)
            for each in (own.weight, own.inputs, residual, heads)
        )
        assert weight is not None
        own = replace(own, weight=weight, inputs=inputs)
        before, after = importance(own, self.backbone, None, None), importance(own, self.backbone, one, two)
        return {"map": importance_map(name, before, after)}

    # ---- one rotation for all blocks --------------------------------------------------------------------------

    def _shared(self, writer: CheckpointWriter) -> list[dict[str, Any]]:
        unit, sizes = "rotations", self.sizes
        if unit not in writer.done:
            with (
                self._prepared(writer.scratch) as terms_of,
                meter(self.recipe.steps, "learning one rotation") as advance,
            ):
                learned = learn_shared_rotation(
                    sizes.blocks,
                    terms_of,
                    self.backbone,
                    hidden=sizes.hidden,
                    progress=advance.step,
                    **self._options,
                )
                assert learned.heads is not None
                seen = self._map(terms_of(0), learned.residual, learned.heads[0])
            assert learned.residual is not None
            writer.write(_SHARED, learned.residual.float())
            for block in range(sizes.blocks):
                writer.write(sizes.heads_name(block), learned.heads[block].float())
            writer.commit(unit, note={"block": None, **_figures(learned), **seen})
        return [writer.notes[unit]]

    @contextmanager
    def _prepared(self, scratch: Path) -> Iterator["_Terms"]:
        """The terms of every block, in memory where they are small, else read again whenever asked for."""
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
            folder = Path(tempfile.mkdtemp(prefix=".ckpt-prune-rotation-", dir=scratch))
        try:
            yield _Terms(self, folder, keep)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # ---- terms ------------------------------------------------------------------------------------------------

    def read(self, block: int) -> dict[str, Tensor]:
        """A block of the dense model."""
        return self.model.read_block(block)

    def moments(self, source: MomentSource, block: int, tensors: Mapping[str, Tensor]) -> dict[str, SpaceMoments]:
        """What the backbone needs of a block, where it needs moments."""
        return source.moments(block, tensors, list(self.family.inputs)) if self.backbone != "magnitude" else {}

    def inputs(self, block: int, tensors: Mapping[str, Tensor], found: Mapping[str, SpaceMoments]) -> dict[str, Tensor]:
        """What the backbone needs of each linear's input (`importance.sensitivity`), by module, float32.

        Linears that read the same input share one tensor, under the name of the first.
        """
        made: dict[str, Tensor] = {}
        for first in self.family.inputs if self.backbone != "magnitude" else []:
            folds = select_input_moments(found[first])
            _, right = rotated_sides(self.family, first, residual=self.turns_stream)
            if not self._needs_gram(right):
                square = sum_folds(folds).square
                made[first] = (square / square.mean().clamp_min(torch.finfo(square.dtype).tiny)).float()
                continue
            moments = sum_folds(folds).to(self.device)
            if self.turns_stream:
                moments = undo_norm(self.family, block, first, tensors, moments)
            assert moments.gram is not None
            name = self.family.tensor(block, first)
            made_of = sensitivity(moments.gram, self.backbone, right is not None, self.recipe.damp, name=name)
            assert made_of is not None
            # An inverse comes column by column.
            made[first] = made_of.float().cpu().contiguous()
        return made

    def _needs_gram(self, right: Side | None) -> bool:
        """Whether an input that is turned on this side needs more than its norms."""
        return self.backbone == "sparsegpt" or right is not None

    @property
    def grams(self) -> dict[str, bool]:
        """For every linear module that is first to read its input, whether the Gram is needed."""
        return {
            first: self._needs_gram(rotated_sides(self.family, first, residual=self.turns_stream)[1])
            for first in self.family.inputs
        }

    def weights(self, block: int, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> list[Term]:
        """The block's linears as rotations see them, float32."""
        whole = fuse_norms(self.family, block, tensors) if self.turns_stream else tensors
        terms = []
        for first, modules in self.family.inputs.items():
            for module in modules:
                left, right = rotated_sides(self.family, module, residual=self.turns_stream)
                if left is not None or right is not None:
                    name = self.family.tensor(block, module)
                    for own, side in self._parts(block, module, whole, left):
                        if side is not None or right is not None:
                            terms.append(Term(name, own.float(), inputs.get(first), side, right))
        return terms

    def _parts(
        self, block: int, module: str, tensors: Mapping[str, Tensor], left: Side | None
    ) -> list[tuple[Tensor, Side | None]]:
        """A weight and the side of its rows; values and what else their module makes are two."""
        weight = tensors[self.family.tensor(block, module)]
        if left != "heads" or self.family.attention.values is None:
            return [(weight, left)]
        lines = value_lines(self.family, block, tensors, self.model.dimension("kv_heads")).to(weight.device)
        others = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
        others[lines] = False
        return [(weight[others], None), (weight[lines], left)]

    def terms(self, block: int, tensors: Mapping[str, Tensor], found: Mapping[str, SpaceMoments]) -> list[Term]:
        """The block's linears as rotations see them, from moments."""
        return self.weights(block, tensors, self.inputs(block, tensors, found))


class _Terms:
    """Terms of any block, as often as asked for.

    Args:
        learner: makes them.
        folder: for what the backbone needs of inputs, which is costly to make.
        keep: whether terms stay in memory.
    """

    def __init__(self, learner: Learner, folder: Path, keep: bool) -> None:
        self._learner, self._folder, self._keep = learner, folder, keep
        self._source = learner.source(learner)
        self._kept: dict[int, list[Term]] = {}

    def __call__(self, block: int) -> list[Term]:
        """The terms of one block."""
        if block in self._kept:
            return self._kept[block]
        learner = self._learner
        tensors = learner.read(block)
        file = self._folder / f"block-{block:05d}.safetensors"
        if not file.exists():
            made = learner.inputs(block, tensors, learner.moments(self._source, block, tensors))
            if not self._keep:
                save_file(made, file)
        else:
            made = load_file(file)
        terms = learner.weights(block, tensors, made)
        if self._keep:
            self._kept[block] = terms
        return terms


def journal_entry(block: int) -> str:
    """The unit of the journal that holds a block's rotations."""
    return f"rotation {block}"


def _figures(learned: LearnedRotations) -> dict[str, Any]:
    return {
        "entropy_before": learned.entropy_before,
        "entropy_after": learned.entropy_after,
        "steps": learned.steps,
        "curve": _thin_out(learned.curve),
    }


def _thin_out(curve: list[float]) -> list[tuple[int, float | None]]:
    """Steps of a curve and what it is there: the first, the last, and others at even distances; no more than fit."""
    stride = max(1, -(-(len(curve) - 1) // _CURVE))
    steps = sorted({*range(0, len(curve), stride), len(curve) - 1} - {-1})
    return [(step, curve[step] if isfinite(curve[step]) else None) for step in steps]
