"""A pruning job: everything checked and settled before the first byte is written."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune._version import __version__
from ckpt_prune.architectures.family import Family, SpaceName
from ckpt_prune.architectures.fitting import fitting_family
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.measure import (
    block_names,
)
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.sources import CachedMoments, DriftMoments, MomentSource, NoMoments, SequentialMoments
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.calibration.streams import HiddenStream, ReadTensors
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.containers.choosing import REMOTE, choose_container, remote_note
from ckpt_prune.containers.container import Container, Widths
from ckpt_prune.errors import UserError
from ckpt_prune.filenames import ROTATIONS
from ckpt_prune.planning.accounting import Cost, cost_of
from ckpt_prune.planning.plan import Plan, SitePlan, StatisticsReference
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.selection import Site
from ckpt_prune.progress import track
from ckpt_prune.recovery.recoverer import Recoverer
from ckpt_prune.recovery.training import Split
from ckpt_prune.rotations.learning import Learner, RotationSizes
from ckpt_prune.rotations.moments import RotatedMoments
from ckpt_prune.rotations.rotated import BlockRotations, RotatedCheckpoint
from ckpt_prune.transform.budgets import decide
from ckpt_prune.transform.checks import check_job, check_plannable
from ckpt_prune.transform.engine import Decisions, Pruner, fill_biases
from ckpt_prune.transform.layout import Layout, plan_layout, source_shapes
from ckpt_prune.transform.masking import Masker

_JOURNAL = 2
"""Form of the notes that a run leaves for the one that resumes it."""


@dataclass(frozen=True)
class LiveSamples:
    """Calibration samples to measure on while pruning.

    Attributes:
        samples: windows of text, or images.
        folds: contiguous folds the moments are kept apart for.
        compute_dtype: in which blocks run.
        allocate: makes the tensor that holds hidden states.
    """

    samples: Samples
    folds: int
    compute_dtype: torch.dtype
    allocate: Allocate = in_memory


@dataclass(frozen=True)
class RecoverySamples:
    """What the blocks of a recipe with recovery are trained on.

    Attributes:
        samples: windows of text, or images.
        compute_dtype: in which blocks run.
        allocate: makes the tensors that hold hidden states.
        after: numbers of blocks k, for the perplexity of the model of which the first k blocks are recovered.
    """

    samples: Samples
    compute_dtype: torch.dtype
    allocate: Allocate = in_memory
    after: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Job:
    """One checkpoint, one recipe, one source of moments.

    Args:
        checkpoint: the source.
        recipe: what to do.
        statistics: the dense cache, or None.
        live: samples for a sequential recipe, or None.
        device: where blocks run and closed forms are solved.
        plan: decisions made earlier, or None.
        diagnostics: also compute errors and spectra that no result depends on.
        rotations: of a block, once they are learned.
        training: samples for a recipe with recovery, or None.
        scores: site → scores of its units in the dense model, where they were worked out before.
        asked: the recipe as it was given, where its size was turned into a ratio (`budgets.at_size`).

    Raises (from `prepare`):
        UserError: anything that does not fit together.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    statistics: Statistics | None = None
    live: LiveSamples | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    plan: Plan | None = None
    diagnostics: bool = False
    rotations: Callable[[int], BlockRotations] | None = None
    training: RecoverySamples | None = None
    scores: Mapping[Site, Tensor] | None = None
    asked: Recipe | None = None

    @cached_property
    def family(self) -> Family:
        """The checkpoint's family."""
        return fitting_family(self.checkpoint)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The dense model's config."""
        return parse_config(self.checkpoint.config)

    @cached_property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.family.dimension(self.config, "layers")

    @property
    def sequential(self) -> bool:
        """Whether moments are measured on the pruned prefix."""
        mask = self.recipe.mask
        needed = mask is None or mask.method != "magnitude"
        return self.live is not None and self.recipe.target != "dense" and needed

    @property
    def settled(self) -> bool:
        """Whether widths are known before anything is measured."""
        known = self.statistics is not None or self.plan is not None or not self.recipe.needs_moments
        return known or self.recipe.allocation == "uniform"

    def check(self) -> None:
        """Check names, shapes, statistics and recipe against each other.

        Raises:
            UserError: with the first thing that does not fit.
        """
        check_job(self)

    def source(self) -> MomentSource:
        """A fresh moment source at the first block."""
        masked_blindly = self.recipe.mask is not None and self.recipe.mask.method == "magnitude"
        if masked_blindly or not self.recipe.needs_moments:
            return NoMoments()
        if self.sequential:
            gram: dict[str, bool] = {space: self.recipe.needs_gram(space) for space in self.recipe.spaces}
            if self.recipe.mask is not None:
                # Wanda needs norms alone; the Gram is for the error that the report states.
                wanted = self.diagnostics or self.recipe.mask.method == "sparsegpt"
                gram = dict.fromkeys(self.family.inputs, wanted)
            true = self.recipe.true_sequential
            if self.recipe.target == "drift":
                return DriftMoments(self.stream(), self.dense_stream(), self.read_block, gram, true_sequential=true)
            return SequentialMoments(self.stream(), gram, true_sequential=true)
        assert self.statistics is not None
        cached = CachedMoments(self.statistics, self.family)
        return cached if self.rotated is None else RotatedMoments(cached, self.rotated)

    def stream(self) -> HiddenStream:
        """A fresh stream of hidden states at the first block, of the model that is pruned."""
        assert self.live is not None
        factory, names, read = self._model(self.live.compute_dtype)
        return HiddenStream(factory, names, read, self.live.samples, folds=self.live.folds, allocate=self.live.allocate)

    def dense_stream(self) -> HiddenStream:
        """The same of the source, before rotations."""
        assert self.live is not None
        factory = BlockFactory(self.family, self.config, device=self.device, dtype=self.live.compute_dtype)
        return HiddenStream(
            factory,
            self.checkpoint.tensors,
            self.checkpoint.read,
            self.live.samples,
            folds=self.live.folds,
            allocate=self.live.allocate,
        )

    def _model(self, dtype: torch.dtype) -> tuple[BlockFactory, Iterable[str], ReadTensors]:
        """The model that is pruned: what builds its blocks, the names of its tensors, and what reads those outside."""
        rotated = self.rotated
        if rotated is None:
            factory = BlockFactory(self.family, self.config, device=self.device, dtype=dtype)
            return factory, self.checkpoint.tensors, self.checkpoint.read
        # Its own config: a model that is built settles in it which attention runs.
        skeleton: Any = self.container.skeleton()
        factory = BlockFactory(self.family, skeleton.config, device=self.device, dtype=dtype, skeleton=skeleton)
        return factory, rotated.names(), rotated.read

    def recoverer(self) -> Recoverer:
        """What recovers each block after it is pruned, at the first block."""
        training, recipe = self.training, self.recipe.recovery
        assert training is not None
        assert recipe is not None
        split = Split.of(len(training.samples), recipe.held_out)

        def stream(sizes: set[int]) -> HiddenStream:
            factory, names, read = self._model(training.compute_dtype)
            return HiddenStream(factory, names, read, training.samples, sizes=sizes, allocate=training.allocate)

        dense, pruned = stream(set()), stream(split.sizes(recipe))
        return Recoverer(dense, pruned, split, recipe, recipe.seed, training.after, training.allocate)

    def learner(self) -> Learner:
        """What learns the recipe's rotations, at the first block."""
        assert self.recipe.rotation is not None

        def source() -> MomentSource:
            if not self.recipe.rotation_needs_moments:
                return NoMoments()
            if self.statistics is not None:
                return CachedMoments(self.statistics, self.family)
            if learner.sizes.kind == "shared":
                raise ValueError("one rotation of all blocks needs statistics: transform.prepare.measured makes them")
            return SequentialMoments(self.dense_stream(), learner.grams, true_sequential=False)

        learner = Learner(
            self.checkpoint,
            self.family,
            self.config,
            self.recipe.rotation,
            self.recipe.importance,
            source,
            self.device,
        )
        return learner

    @cached_property
    def rotated(self) -> RotatedCheckpoint | None:
        """The source under the recipe's rotations, or None where it has none; its tensors once they are learned."""
        if self.recipe.rotation is None:
            return None

        def unknown(_block: int) -> BlockRotations:
            raise ValueError("the rotations are not learned yet")

        kind = self.recipe.rotation.kind
        known = self.rotations or unknown
        return RotatedCheckpoint(self.checkpoint, self.family, self.config, kind, known, self.device)

    def read_block(self, block: int) -> dict[str, Tensor]:
        """A block's tensors, rotated where the recipe rotates."""
        names = block_names(self.checkpoint, self.family, block)
        if self.rotated is None:
            return self.checkpoint.read(names)
        tensors = self.rotated.block(block, names)
        # Rotated blocks are built as the output's are, which may have slots that nothing is folded into.
        fill_biases(self.family, block, self.container.biases, tensors)
        return tensors

    def read(self, name: str) -> Tensor:
        """A tensor outside the blocks, rotated where the recipe rotates."""
        return (self.checkpoint if self.rotated is None else self.rotated).read([name])[name]

    # ---- what is settled before the first block ------------------------------------------------------------

    @cached_property
    def decisions(self) -> Decisions:
        """Kept units, counts and compensations that a plan, a ranking over all blocks or a budget settles."""
        if self.plan is not None:
            sites = {(s.block, s.space): s for s in self.plan.sites}
            kept = {site: torch.tensor(plan.kept) for site, plan in sites.items()}
            scores = {site: torch.tensor(plan.scores, dtype=torch.float64) for site, plan in sites.items()}
            return Decisions(self.recipe, kept, sites, scores=scores)
        return decide(self)

    @property
    def unsettled(self) -> Pruner:
        """For counts and scores: nothing is settled."""
        return Pruner(self.family, self.config, Decisions(self.recipe), frozenset(), self.device)

    @cached_property
    def widths(self) -> Widths:
        """Units kept per block and space."""
        return self.widths_of(self.decisions)

    def widths_of(self, decisions: Decisions) -> Widths:
        """Units kept per block and space under other decisions."""
        pruner = Pruner(self.family, self.config, decisions, frozenset(), self.device)

        def width(block: int, space: SpaceName) -> int:
            kept = decisions.kept.get((block, space))
            if kept is None:
                return pruner.count(block, space)
            units = self.family.units(self.config, space)
            return kept.numel() * units // self.family.site_units(self.config, space)

        return [{space: width(block, space) for space in self.recipe.spaces} for block in range(self.blocks)]

    @cached_property
    def container(self) -> Container:
        """What the output is stored as."""
        return self._container_of(self.widths)

    def _container_of(self, widths: Widths) -> Container:
        biases = {m for m in self.family.linears if self.family.tensor(0, m, "bias") in self.checkpoint.tensors}
        for space, own in self.recipe.spaces.items():
            units = self.family.units(self.config, space)
            pruned = any(w[space] < units for w in widths)
            if pruned and own.compensation.opens_bias:
                biases.add(self.family.columns[space].consumer)
        rotated = self.rotated
        turns = rotated is not None and bool(rotated.turns)
        chosen = choose_container(
            self.family,
            self.checkpoint.config,
            widths,
            biases | (rotated.added_biases if rotated is not None else frozenset()),
            requested=REMOTE if turns else self.recipe.container,
            per_layer=self.recipe.widths == "per_layer",
        )
        if rotated is None:
            return chosen
        note = chosen.note
        if turns:
            note = remote_note(chosen.model_type, "the residual stream turns between blocks")
        elif rotated.kind == "shared" and rotated.tied:
            note = "; ".join(
                filter(None, [note, "the head is no longer tied to the embedding: it reads another basis"])
            )
        return replace(chosen, config=rotated.config_values(chosen.config), note=note)

    @cached_property
    def layout(self) -> Layout:
        """The checkpoint's files, tensors, dtypes and shapes."""
        return self._layout_of(self.widths, self.container)

    def _layout_of(self, widths: Widths, container: Container) -> Layout:
        added = self.rotated.added if self.rotated is not None else None
        return plan_layout(self.checkpoint, self.family, widths, container, added)

    @cached_property
    def aside(self) -> Layout:
        """The same of files beside the checkpoint: the rotations."""
        if self.recipe.rotation is None:
            return {}
        sizes = RotationSizes.of(self.recipe.rotation.kind, self.family, self.config)
        return {ROTATIONS: sizes.layout}

    @cached_property
    def before(self) -> Cost:
        """Cost of the source."""
        return cost_of(self.family, self.config, source_shapes(self.checkpoint))

    @cached_property
    def after(self) -> Cost:
        """Cost of the output."""
        return self._cost_of(self.layout, self.container)

    def cost_at(self, widths: Widths) -> Cost:
        """Cost of the output at other widths, with the container it would have there."""
        container = self._container_of(widths)
        return self._cost_of(self._layout_of(widths, container), container)

    def _cost_of(self, layout: Layout, container: Container) -> Cost:
        shapes = {name: shape for tensors in layout.values() for name, shape in tensors.items()}
        # The output's config: rotations may have untied the head.
        return cost_of(self.family, parse_config(container.config), shapes)

    def pruner(self) -> Pruner | Masker:
        """The engine for this job."""
        mask = self.recipe.mask
        if mask is None:
            return self.unit_pruner()
        return Masker(self.family, mask, self.recipe.ratio, self.container.biases, self.device, self.diagnostics)

    def unit_pruner(self) -> Pruner:
        """The engine of a recipe with spaces."""
        container = self.container
        return Pruner(
            self.family,
            self.config,
            self.decisions,
            container.biases,
            self.device,
            diagnostics=self.diagnostics,
            padded=container.padded,
        )

    @cached_property
    def digest(self) -> str:
        """sha256 of all that the output depends on: what a resumed run must share with the one it continues."""
        live = None
        if self.live is not None:
            live = [self.live.samples.fingerprint, self.live.folds, str(self.live.compute_dtype)]
        parts: list[Any] = [
            __version__,
            _JOURNAL,
            self.checkpoint.fingerprint,
            self.recipe.digest,
            self.statistics.index.digest if self.statistics else None,
            live,
            self.plan.digest if self.plan else None,
            self.device.type,
            self.diagnostics,
        ]
        if self.training is not None:
            training = self.training
            parts += [training.samples.fingerprint, str(training.compute_dtype), sorted(training.after)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def provenance(self) -> dict[str, Any]:
        """Where the moments came from, for the report."""
        if self.statistics is not None and not self.sequential:
            index = self.statistics.index
            return {
                "target": "dense",
                "modality": index.modality,
                "statistics": index.digest,
                "samples": index.samples,
                "window": index.window,
                "tokens": index.tokens,
                "folds": index.folds,
            }
        if self.live is not None:
            samples = self.live.samples
            return {
                "target": self.recipe.target + ("" if self.recipe.true_sequential else ", once per block"),
                "modality": self.family.modality,
                "data": samples.fingerprint,
                "samples": len(samples),
                "window": samples.tokens,
                "tokens": len(samples) * samples.tokens,
                "folds": self.live.folds,
            }
        return {"target": "none"}


def make_plan(job: Job) -> Plan:
    """Decide and predict for every site, without writing a tensor.

    Raises:
        UserError: the job does not fit together, or needs text.
    """
    job.check()
    check_plannable(job.recipe)
    if job.sequential:
        raise UserError("a plan is made from statistics: calibrate first, or let prune measure with --text")
    pruner, source = job.unit_pruner(), job.source()
    sites: list[SitePlan] = []
    for block in track(range(job.blocks), "planning", total=job.blocks):
        spaces = [space for space in job.family.spaces if space in job.recipe.spaces]
        moments: Mapping[SpaceName, Any] = source.moments(block, {}, spaces)
        for space in spaces:
            names = [name for name in pruner.sites.tensors(block, space) if name in job.checkpoint.tensors]
            sites.append(pruner.site(block, space, job.checkpoint.read(names), moments.get(space))[0])
    statistics = None
    if job.statistics is not None:
        path = str(job.statistics.folder.resolve())
        statistics = StatisticsReference(path=path, digest=job.statistics.index.digest)
    return Plan(
        model=job.checkpoint.fingerprint,
        model_path=str(job.checkpoint.path),
        recipe=job.recipe,
        recipe_digest=job.recipe.digest,
        statistics=statistics,
        container=job.container.model_type if job.container.remote_class is None else "remote",
        container_note=job.container.note,
        before=job.before,
        after=job.after,
        sites=sites,
    )
