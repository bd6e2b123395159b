"""A pruning job: everything checked and settled before the first byte is written."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune._version import __version__
from ckpt_prune.architectures.family import Family, SpaceName, family_of
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.measure import block_names, checkpoint_dtype, consumer_widths
from ckpt_prune.calibration.moments import Moments, total
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.calibration.text import text_fingerprint
from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.compensation.methods import METHODS
from ckpt_prune.errors import UserError
from ckpt_prune.planning.accounting import Cost, cost_of
from ckpt_prune.planning.plan import Plan, SitePlan, StatisticsReference
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.selection import Site, select_ranked, standardise
from ckpt_prune.progress import track
from ckpt_prune.transform.containers import Container, Widths, choose_container
from ckpt_prune.transform.engine import Decisions, Pruner
from ckpt_prune.transform.layout import Layout, check_source, plan_layout, source_shapes
from ckpt_prune.transform.sources import CachedMoments, MomentSource, NoMoments, SequentialMoments


@dataclass(frozen=True)
class LiveText:
    """Calibration windows to measure on while pruning.

    Attributes:
        windows: token ids, (N, T) int64.
        folds: contiguous folds the moments are kept apart for.
        compute_dtype: in which blocks run.
    """

    windows: Tensor
    folds: int
    compute_dtype: torch.dtype


@dataclass(frozen=True)
class Job:
    """One checkpoint, one recipe, one source of moments.

    Args:
        checkpoint: the source.
        recipe: what to do.
        statistics: the dense cache, or None.
        live: text for a sequential recipe, or None.
        device: where blocks run and closed forms are solved.
        plan: decisions made earlier, or None.

    Raises (from `prepare`):
        UserError: anything that does not fit together.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    statistics: Statistics | None = None
    live: LiveText | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    plan: Plan | None = None
    diagnostics: bool = False

    @cached_property
    def family(self) -> Family:
        """The checkpoint's family."""
        return family_of(self.checkpoint.config)

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
        return self.live is not None and self.recipe.target == "sequential"

    def check(self) -> None:
        """Check names, shapes, statistics and recipe against each other.

        Raises:
            UserError: with the first thing that does not fit.
        """
        check_source(self.checkpoint, self.family)
        if self.recipe.needs_moments and self.statistics is None and self.live is None:
            raise UserError(f"recipe {self.recipe.name} needs statistics: give --statistics, or --text to measure them")
        if self.statistics is not None:
            self.statistics.check_model(
                model=self.checkpoint.fingerprint,
                tokenizer=tokenizer_fingerprint(self.checkpoint.path),
                dtype=checkpoint_dtype(self.checkpoint),
                blocks=self.blocks,
                consumers=consumer_widths(self.family, self.config),
            )
            if "gram" not in self.statistics.index.collect:
                lacking = [s.compensation.method for s in self.recipe.spaces.values()]
                lacking = [m for m in lacking if METHODS[m].needs_gram]
                if lacking:
                    raise UserError(
                        f"compensation {lacking[0]} needs Grams, and {self.statistics.folder} has none: "
                        "calibrate with --collect moments,gram"
                    )
        folds = self.live.folds if self.live else self.statistics.index.folds if self.statistics else 0
        if self.recipe.needs_folds and folds < 2 and self.plan is None:
            raise UserError("lambda_by: folds needs at least two folds: calibrate with --folds 4")
        if self.recipe.perplexity_grid and self.live is None and self.plan is None:
            raise UserError("lambda_by: perplexity needs text to measure it on: give --text")
        if self.plan is not None and self.plan.model != self.checkpoint.fingerprint:
            raise UserError(f"the plan was made for another model ({self.plan.model_path}), not {self.checkpoint.path}")
        if self.plan is not None:
            self._check_plan(self.plan)

    def _check_plan(self, plan: Plan) -> None:
        """Every pruned space of every block once, its kept units ascending and among those there are."""
        expected = [(block, space) for block in range(self.blocks) for space in self.recipe.spaces]
        if sorted((s.block, s.space) for s in plan.sites) != sorted(expected):
            raise UserError("the plan does not list every space of every block once: plan again instead of editing it")
        for site in plan.sites:
            units = self.family.units(self.config, site.space)
            if not site.kept or sorted(set(site.kept) & set(range(units))) != site.kept:
                raise UserError(
                    f"the plan's kept units of {site.space} in block {site.block} are not ascending indices "
                    f"below {units}: plan again instead of editing it"
                )

    def source(self) -> MomentSource:
        """A fresh moment source at the first block."""
        if not self.recipe.needs_moments:
            return NoMoments()
        if self.sequential:
            gram = {space: self.recipe.needs_gram(space) for space in self.recipe.spaces}
            return SequentialMoments(self.stream(), gram, true_sequential=self.recipe.true_sequential)
        assert self.statistics is not None
        return CachedMoments(self.statistics, self.family)

    def stream(self) -> HiddenStream:
        """A fresh stream of hidden states at the first block."""
        assert self.live is not None
        factory = BlockFactory(self.family, self.config, device=self.device, dtype=self.live.compute_dtype)
        return HiddenStream(factory, self.checkpoint.read, self.live.windows, folds=self.live.folds)

    def read_block(self, block: int) -> dict[str, Tensor]:
        """A block's tensors."""
        return self.checkpoint.read(block_names(self.checkpoint, self.family, block))

    # ---- what is settled before the first block ------------------------------------------------------------

    @cached_property
    def decisions(self) -> Decisions:
        """Kept units and strengths that a plan or a ranking over all blocks settles."""
        if self.plan is not None:
            kept = {(s.block, s.space): torch.tensor(s.kept) for s in self.plan.sites}
            return Decisions(self.recipe, kept, {(s.block, s.space): s.strength for s in self.plan.sites})
        if self.recipe.allocation == "uniform":
            return Decisions(self.recipe)
        return Decisions(self.recipe, self._ranked())

    def _ranked(self) -> dict[Site, Tensor]:
        pruner = Pruner(self.family, self.config, Decisions(self.recipe), frozenset(), self.device)
        source = self.source()
        scores: dict[Site, Tensor] = {}
        for block in track(range(self.blocks), "ranking", total=self.blocks):
            spaces = list(self.recipe.spaces)
            moments = source.moments(block, {}, spaces)
            for space in spaces:
                name = self.family.tensor(block, self.family.spaces[space].consumer)
                weight = self.checkpoint.read([name])[name].to(self.device)
                folds = moments.get(space)
                whole = None if folds is None else _vectors(folds).to(self.device)
                columns = pruner.column_scores(space, weight, whole)
                scores[block, space] = standardise(columns, self.family.unit_columns(self.config, space))
        costs: dict[SpaceName, float] = {space: float(self._unit_parameters(space)) for space in self.recipe.spaces}
        if self.recipe.allocation == "across-layers":
            kept: dict[Site, Tensor] = {}
            for space in self.recipe.spaces:
                own = {site: s for site, s in scores.items() if site[1] == space}
                units = sum(s.numel() for s in own.values())
                budget = (1 - self.recipe.ratio_of(space)) * units
                kept |= select_ranked(own, {space: 1.0}, budget)
            return kept
        budget = 0.0
        for site, own_scores in scores.items():
            budget += own_scores.numel() * costs[site[1]] * (1 - self.recipe.ratio_of(site[1]))
        return select_ranked(scores, costs, budget)

    def _unit_parameters(self, space: SpaceName) -> int:
        """Weights that go with one unit of a space."""
        description = self.family.spaces[space]
        rows = sum(self.family.per_unit(self.config, factors) for factors in description.producers.values())
        return (rows + self.family.unit_columns(self.config, space)) * self.family.dimension(self.config, "hidden")

    @cached_property
    def widths(self) -> Widths:
        """Units kept per block and space."""
        pruner = Pruner(self.family, self.config, self.decisions, frozenset(), self.device)

        def width(block: int, space: SpaceName) -> int:
            kept = self.decisions.kept.get((block, space))
            return pruner.keep_count(space) if kept is None else kept.numel()

        return [{space: width(block, space) for space in self.recipe.spaces} for block in range(self.blocks)]

    @cached_property
    def container(self) -> Container:
        """What the output is stored as."""
        modules = {m for d in self.family.spaces.values() for m in (*d.producers, d.consumer)}
        biases = {m for m in modules if self.family.tensor(0, m, "bias") in self.checkpoint.tensors}
        for space, own in self.recipe.spaces.items():
            units = self.family.units(self.config, space)
            pruned = any(w[space] < units for w in self.widths)
            if pruned and METHODS[own.compensation.method].adds_bias:
                biases.add(self.family.spaces[space].consumer)
        return choose_container(
            self.family,
            self.checkpoint.config,
            self.widths,
            biases,
            requested=self.recipe.container,
            per_layer=self.recipe.widths == "per_layer",
        )

    @cached_property
    def layout(self) -> Layout:
        """The output's files, tensors, dtypes and shapes."""
        return plan_layout(self.checkpoint, self.family, self.widths, self.container)

    @cached_property
    def before(self) -> Cost:
        """Cost of the source."""
        return cost_of(self.family, self.config, source_shapes(self.checkpoint))

    @cached_property
    def after(self) -> Cost:
        """Cost of the output."""
        shapes = {name: shape for tensors in self.layout.values() for name, shape in tensors.items()}
        return cost_of(self.family, self.config, shapes)

    def pruner(self) -> Pruner:
        """The engine for this job."""
        return Pruner(
            self.family, self.config, self.decisions, self.container.biases, self.device, diagnostics=self.diagnostics
        )

    @cached_property
    def digest(self) -> str:
        """sha256 of all that the output depends on: what a resumed run must share with the one it continues."""
        live = None
        if self.live is not None:
            live = [text_fingerprint(self.live.windows), self.live.folds, str(self.live.compute_dtype)]
        parts = [
            __version__,
            self.checkpoint.fingerprint,
            self.recipe.digest,
            self.statistics.index.digest if self.statistics else None,
            live,
            self.plan.digest if self.plan else None,
            self.device.type,
            self.diagnostics,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def provenance(self) -> dict[str, Any]:
        """Where the moments came from, for the report."""
        if self.statistics is not None:
            index = self.statistics.index
            return {
                "target": "dense",
                "statistics": index.digest,
                "samples": index.samples,
                "window": index.window,
                "tokens": index.tokens,
                "folds": index.folds,
            }
        if self.live is not None:
            samples, window = self.live.windows.shape
            return {
                "target": "sequential" if self.recipe.true_sequential else "sequential, once per block",
                "text": text_fingerprint(self.live.windows),
                "samples": samples,
                "window": window,
                "tokens": samples * window,
                "folds": self.live.folds,
            }
        return {"target": "none"}


def _vectors(folds: tuple[Moments, ...]) -> Moments:
    """Sum of folds without their Grams, which a ranking does not need."""
    return total(tuple(replace(fold, gram=None) for fold in folds))


def make_plan(job: Job) -> Plan:
    """Decide and predict for every site, without writing a tensor.

    Raises:
        UserError: the job does not fit together, or needs text.
    """
    job.check()
    if job.sequential:
        raise UserError("a plan is made from statistics: calibrate first, or let prune measure with --text")
    pruner, source = job.pruner(), job.source()
    sites: list[SitePlan] = []
    for block in track(range(job.blocks), "planning", total=job.blocks):
        spaces = [space for space in job.family.spaces if space in job.recipe.spaces]
        moments: Mapping[SpaceName, Any] = source.moments(block, {}, spaces)
        for space in spaces:
            name = job.family.tensor(block, job.family.spaces[space].consumer)
            sites.append(pruner.site(block, space, job.checkpoint.read([name])[name], moments.get(space))[0])
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
