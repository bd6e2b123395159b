"""The state of a job: the model as the stages have left it so far, and what is decided of the output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.job.decisions import Decisions
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.job.layout import Output
from ckpt_prune.job.model_view import Basis, ModelView
from ckpt_prune.job.plan import Plan
from ckpt_prune.measure.samples.samples import reads_whole
from ckpt_prune.measure.statistics.end_states import EndStates
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.containers.choosing import ANY, unprunable_spaces
from ckpt_prune.model.containers.container import Container, container_of
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.recipe import AnyStage, Recipe


@dataclass(frozen=True)
class RankedUnits:
    """Scores of the units of a site, and errors, by the dense model's statistics.

    Attributes:
        score: name of the score.
        scores: of its units, (units,), or of q and k (heads, dimensions).
        errors: of dropping the k units of least score, k = 0 … n, (n + 1,) (`Solver.errors`); None if widths do not
            depend on them.
    """

    score: str
    scores: Tensor
    errors: Tensor | None


@dataclass(frozen=True)
class RankedSites:
    """The units of every site by every score that may rank them."""

    units: Mapping[Site, Sequence[RankedUnits]]


Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Prepared:
    """A job as far as it is prepared. Every stage returns a new one.

    Attributes:
        job: what to do.
        model: the model as the stages so far have left it.
        recipe: what is left to do.
        statistics: of `model`, or None.
        live: samples to measure it on, or None.
        ends: states behind the blocks of the model as it was measured, or None.
        start: the job before blocks or dimensions went; None while the model is the job's own.
        plan: decisions that were made before, or None.
        basis: the model in another basis of its residual stream: rotated, or sliced.
        decided: units that stay, and other decisions for every site; None before that is known.
        planned: container, files and cost of the output; likewise.
        foreseen: True if widths or blocks only stand for those that measuring will choose.
        shape_known: False if the container may depend on what measuring will choose.
        known: what single stages have found, by its class (`facts`).
    """

    job: Job
    model: Model
    recipe: Recipe
    statistics: Statistics | None = None
    live: LiveSamples | None = None
    ends: EndStates | None = None
    start: "Prepared | None" = None
    plan: Plan | None = None
    basis: Basis | None = None
    decided: Decisions | None = None
    planned: Output | None = None
    foreseen: bool = False
    shape_known: bool = True
    known: Mapping[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Keep those of the recipe's spaces that this model has and may prune."""
        recipe = self.recipe.at(self.model.family)
        if recipe.shares_stock and not self.model.has_remote_code:
            insisted = {name for name, settings in recipe.spaces.items() if settings.ratio is not None}
            recipe = recipe.without(unprunable_spaces(self.model).keys() - insisted)
        object.__setattr__(self, "recipe", recipe)

    def __repr__(self) -> str:
        after = None if self.planned is None else self.after
        source = str(self.job.model.checkpoint.path)
        return short_repr(
            self, source=source, recipe=self.recipe.name, before=self.before, after=after, foreseen=self.foreseen
        )

    # ---- the job ---------------------------------------------------------------------------------------------

    @property
    def whole(self) -> "Prepared":
        """The job on the model with all its blocks and dimensions. Its recipe is the one for the record.

        That recipe has ratios in place of a size, and the strength that was chosen. If blocks or dimensions are gone,
        it is the one that was given: what is left to do says nothing of them.
        """
        return self.start or self

    def stage(self, kind: type[AnyStage]) -> AnyStage:
        """Return the recipe's stage of a kind, which it has."""
        stage = self.recipe.get(kind)
        assert stage is not None
        return stage

    def facts(self, kind: type[Fact]) -> Fact | None:
        """Return what a stage has found, by the class that holds it; None if it has not run."""
        return self.known.get(kind)

    def knowing(self, fact: object) -> "Prepared":
        """Return the state with what a stage has found, in place of an earlier one of its class."""
        return replace(self, known={**self.known, type(fact): fact})

    @property
    def left_whole(self) -> list[SpaceName]:
        """Spaces of the recipe that stay whole because no stock class has fewer of their units."""
        full, remaining = self.job.recipe.at(self.job.model.family), begin(self.job).recipe
        return [space for space in full.spaces if space not in remaining.spaces]

    @property
    def ranked(self) -> Mapping[Site, Sequence[RankedUnits]] | None:
        """Units of every site by every score that may rank them, if they were ranked already."""
        ranking = self.facts(RankedSites)
        return None if ranking is None else ranking.units

    @property
    def device(self) -> torch.device:
        return self.job.device

    @property
    def diagnostics(self) -> bool | None:
        return self.job.diagnostics

    @property
    def stored(self) -> Container | None:
        """The container of the model, if it carries code of its own."""
        if self.model is self.job.model:
            return self.job.stored
        return container_of(self.model) if self.model.has_remote_code else None

    # ---- what is measured ------------------------------------------------------------------------------------

    @property
    def sequential(self) -> bool:
        """True if moments are measured on the pruned prefix."""
        return self.live is not None and self.recipe.target != "dense" and self.recipe.measures_prefix

    @property
    def sees_images(self) -> bool:
        """True if the text part of a model was, or is to be, measured on images with their text."""
        if self.live is not None and (self.sequential or self.statistics is None):
            return reads_whole(self.live.samples)
        return self.statistics is not None and self.statistics.index.modality == "image-text"

    @property
    def lacks_moments(self) -> bool:
        """True if the recipe needs moments, and neither statistics nor samples are given."""
        if self.plan is not None and self.plan.depth is not None:
            return False  # its blocks are chosen; samples for maps are asked for before the run
        return self.recipe.needs_moments and self.statistics is None and self.live is None

    @property
    def measures_first(self) -> bool:
        """True if the unpruned model is measured on the live samples before anything is pruned."""
        if self.live is None or self.statistics is not None or not self.recipe.needs_statistics:
            return False
        if self.recipe.changes_model:
            return True
        if self.ranked is not None and self.sequential:
            return False
        return self.recipe.measures_dense or not self.sequential

    @property
    def widths_known(self) -> bool:
        """True if widths are known before anything is measured."""
        if self.recipe.changes_model:
            return False
        has_moments = self.statistics is not None or self.plan is not None or self.ranked is not None
        has_moments = has_moments or not self.recipe.needs_statistics
        return has_moments or (self.recipe.allocation == "uniform" and not self.recipe.decides_widths)

    # ---- the output ------------------------------------------------------------------------------------------

    @property
    def decisions(self) -> Decisions:
        """The number of units that stay at every site, and other decisions for it."""
        if self.decided is None:
            raise self._unknown()
        return self.decided

    @property
    def output(self) -> Output:
        if self.planned is None:
            raise self._unknown()
        return self.planned

    def _unknown(self) -> UserError:
        return UserError(
            f"allocation {self.recipe.allocation} has no widths before the model is measured: `ckpt-prune plan "
            "--statistics STATS` prints them"
        )

    @property
    def before(self) -> Cost:
        """The cost of the source; its bytes are those of its files, where weights may have few bits."""
        model = self.job.stored_model
        cost, checkpoint = cost_of(model), model.checkpoint
        return cost if checkpoint.quantisation is None else cost.model_copy(update={"bytes": checkpoint.nbytes})

    @property
    def after(self) -> Cost:
        return self.output.cost

    @property
    def widths(self) -> list[dict[Any, int]]:
        """Units kept per block and space."""
        return self.decisions.widths(self.model)

    def counts(self, space: SpaceName) -> list[int]:
        """Return the units of a space that are kept, in each block that has it."""
        return [widths[space] for widths in self.widths if space in widths]

    @property
    def container_known(self) -> bool:
        """False if the container depends on widths that measuring chooses."""
        return self.shape_known or self.recipe.container not in ("auto", ANY)

    def with_strength(self, strength: float) -> "Prepared":
        """Return the job with a fixed strength wherever it was to be chosen by perplexity. No width depends on it."""
        recipe = self.recipe.with_strength(strength)
        return replace(self, recipe=recipe, decided=replace(self.decisions, recipe=recipe))

    # ---- the model -------------------------------------------------------------------------------------------

    @property
    def view(self) -> ModelView:
        """The model that blocks are read from: in another basis if there is one."""
        container = self.stored if self.basis is None else self.output.container
        return ModelView(self.model, self.device, self.basis, container, kept=self._kept_everywhere)

    @property
    def plain_view(self) -> ModelView:
        return ModelView(self.model, self.device, container=self.stored)

    @property
    def live_samples(self) -> LiveSamples:
        """`live` of a job that was given samples."""
        assert self.live is not None
        return self.live

    def live_stream(self, view: ModelView) -> HiddenStream:
        """Return the hidden states of the live samples at the first block of a model."""
        live = self.live_samples
        return view.stream(
            live.samples, live.compute_dtype, folds=live.folds, allocate=live.allocate, group=process_group()
        )

    @property
    def _kept_everywhere(self) -> dict[SpaceName, Tensor]:
        """Return units that stay of what mixes tokens, where the first block passes on what depends on them.

        Where every block loses others, what is passed on is the same for all units: it depends on their number alone.
        """
        model, kept = self.model, dict[SpaceName, Tensor]()
        for space in () if self.decided is None else filter(model.family.is_passed_on, self.recipe.spaces):
            site = self.decisions.of(model, Site(0, space))
            first = model.family.spaces[space].first(site.keep, model.dimension)
            if site.keep < model.units(space, 0):
                kept[space] = first if site.kept is None else site.kept
        return kept


def begin(job: Job) -> Prepared:
    facts_by_type = {type(fact): fact for fact in job.opened}
    return Prepared(job, job.model, job.recipe, job.statistics, job.live, plan=job.plan, known=facts_by_type)
