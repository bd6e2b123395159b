"""Settling a request: everything checked and decided, nothing written."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from ckpt_prune._version import __version__
from ckpt_prune.architectures.model import Model
from ckpt_prune.calibration.moments import ACTIVE_THRESHOLD
from ckpt_prune.calibration.sources import (
    CachedMoments,
    DriftMoments,
    MomentSource,
    NoMoments,
    SequentialMoments,
)
from ckpt_prune.containers.choosing import ANY
from ckpt_prune.errors import UserError
from ckpt_prune.glance import glance
from ckpt_prune.parallel.group import here
from ckpt_prune.planning.accounting import cost_of
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.records import Cost, MaskShares
from ckpt_prune.rotations.moments import RotatedMoments
from ckpt_prune.rotations.rotated import RotatedCheckpoint, Rotations, not_learned
from ckpt_prune.transform.budgets import decide, ranking_of
from ckpt_prune.transform.checks import check_data, check_enough_samples, check_fit, check_request
from ckpt_prune.transform.decisions import Decisions, planned
from ckpt_prune.transform.dense import Dense
from ckpt_prune.transform.engine import Pruner
from ckpt_prune.transform.factoring import Factorer
from ckpt_prune.transform.masking import Masker
from ckpt_prune.transform.output import Output, output_of
from ckpt_prune.transform.request import Request
from ckpt_prune.transform.sizing import at_size
from ckpt_prune.transform.standing import standing_in

_JOURNAL = 6
"""Form of the notes that a run leaves for the one that resumes it."""


@dataclass(frozen=True)
class Settled:
    """A request that was checked, with all that is decided before the first block.

    Attributes:
        request: as it was given; where one ratio reaches its recipe's size, with that ratio.
        known: decisions and output; None where widths are found once the model is measured.
        rotations: of a block, once they are learned.
        shares: of a mask's zeros, once they are shared out over blocks; None where all have the recipe's.
        foreseen: whether the widths are only those of one ratio everywhere, in place of those that measuring finds, or
            the blocks that are gone only as many as will be.
    """

    request: Request
    known: tuple[Decisions, Output] | None
    rotations: Rotations = not_learned
    shares: MaskShares | None = None
    foreseen: bool = False

    def __repr__(self) -> str:
        after = None if self.known is None else self.after
        source = str(self.request.whole.model.checkpoint.path)
        return glance(
            self, source=source, recipe=self.recipe.name, before=self.before, after=after, foreseen=self.foreseen
        )

    @property
    def model(self) -> Model:
        """The dense model."""
        return self.request.model

    @property
    def recipe(self) -> Recipe:
        """What to do."""
        return self.request.recipe

    @property
    def decisions(self) -> Decisions:
        """How many units of every site stay, and what else is settled of them."""
        return self._known[0]

    @property
    def output(self) -> Output:
        """Container, files and cost of the output."""
        return self._known[1]

    @property
    def _known(self) -> tuple[Decisions, Output]:
        if self.known is None:
            raise UserError(
                f"allocation {self.recipe.allocation} has no widths before the model is measured: `ckpt-prune plan "
                "--statistics STATS` tells them"
            )
        return self.known

    @property
    def before(self) -> Cost:
        """Cost of the source."""
        return cost_of(self.request.whole.model)

    @property
    def container_known(self) -> bool:
        """Whether what the output is stored as can be told: where measuring finds widths, it depends on them."""
        recipe, hidden = self.recipe, self.request.whole.recipe.hidden
        shapes_known = recipe.mask is not None or recipe.low_rank is not None or self.request.widths_known
        found = self.foreseen and (not shapes_known or (hidden is not None and hidden.auto))
        return not found or recipe.container not in ("auto", ANY)

    @property
    def after(self) -> Cost:
        """Cost of the output."""
        return self.output.cost

    @property
    def widths(self) -> list[dict[Any, int]]:
        """Units kept per block and space."""
        return self.decisions.widths(self.model)

    @property
    def spaced_widths(self) -> list[dict[Any, int]]:
        """The same of the blocks that have spaces alone (`Model.spaced`)."""
        return self.widths[self.model.spaced.start :]

    def with_strength(self, strength: float) -> "Settled":
        """This job with a fixed strength wherever it was to be chosen by perplexity. No width depends on it."""
        recipe = self.recipe.with_strength(strength)
        decisions, output = self._known
        known = (decisions.with_recipe(recipe), output)
        return replace(self, request=replace(self.request, recipe=recipe), known=known)

    # ---- what acts on blocks --------------------------------------------------------------------------------

    @property
    def rotated(self) -> RotatedCheckpoint | None:
        """The source under the recipe's rotations, or None where it has none."""
        rotation = self.recipe.rotation
        if rotation is None:
            return None
        return RotatedCheckpoint(self.model, rotation.kind, self.rotations, self.request.device)

    @property
    def dense(self) -> Dense:
        """The model that is pruned: the source, rotated or sliced where the recipe says so."""
        narrowed = self.request.narrowed
        rotated = self.rotated if narrowed is None else narrowed.view
        container = self.request.stored if rotated is None else self.output.container
        return Dense(self.model, self.request.device, rotated, container)

    @property
    def source(self) -> Dense:
        """The source as it is stored."""
        return Dense(self.model, self.request.device, container=self.request.stored)

    def engine(self) -> Pruner | Masker | Factorer:
        """What prunes a block."""
        request, container = self.request, self.output.container
        if request.recipe.low_rank is not None:
            dense = None
            if request.recipe.low_rank.update and request.statistics is not None:
                dense = CachedMoments(request.statistics, self.model)
            return Factorer(self.model.family, self.output.ranks, request.device, dense)
        if request.recipe.mask is not None:
            return Masker(
                self.model,
                request.recipe.mask,
                request.recipe.ratio,
                request.recipe.mask.groups,
                container.biases,
                request.device,
                request.diagnostics,
                self.shares.ratios if self.shares is not None else None,
            )
        return self.unit_engine()

    def unit_engine(self) -> Pruner:
        """What prunes the spaces of a block."""
        request, container = self.request, self.output.container
        return Pruner(
            self.model,
            self.decisions,
            container.biases,
            request.device,
            diagnostics=request.diagnostics,
            padded=container.padded,
        )

    def moments(self) -> MomentSource:
        """A fresh moment source at the first block."""
        request, recipe = self.request, self.recipe
        if (recipe.mask is not None and not recipe.linears_need_moments) or not recipe.needs_moments:
            return NoMoments()
        if request.sequential:
            gram: dict[str, bool] = {space: recipe.measures_more(space) for space in recipe.spaces}
            if recipe.mask is not None:
                # Wanda needs norms alone; the Gram is for the error that the report states.
                wanted = request.diagnostics or recipe.mask.method == "sparsegpt"
                gram = dict.fromkeys(self.model.family.inputs, wanted)
            if recipe.low_rank is not None:
                gram = dict.fromkeys(self.model.family.inputs, True)
            true, dense = recipe.true_sequential, self.dense
            if recipe.target == "drift":
                goal, seen = self._goal
                return DriftMoments(
                    self.live_stream(dense), self.live_stream(goal), goal.block, gram, true_sequential=true, seen=seen
                )
            return SequentialMoments(self.live_stream(dense), gram, true_sequential=true)
        assert request.statistics is not None
        cached, rotated = CachedMoments(request.statistics, self.model), self.rotated
        return cached if rotated is None else RotatedMoments(cached, rotated)

    @property
    def _goal(self) -> tuple[Dense, Callable[[Tensor], Tensor] | None]:
        """The model whose stream is fitted to, and what of it a narrower stream has room for."""
        narrowed = self.request.narrowed
        if narrowed is None or narrowed.into is None:
            return self.source, None
        own = narrowed.whole
        return Dense(own.model, own.device, container=own.stored), narrowed.into.seen

    def live_stream(self, dense: Dense) -> Any:
        """Hidden states of the live samples at the first block of a model."""
        live = self.request.live
        assert live is not None
        options = {"folds": live.folds, "allocate": live.allocate, "group": here()}
        return dense.stream(live.samples, live.compute_dtype, **options)

    # ---- for the record --------------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """sha256 of all that the output depends on: what a resumed run must share with the one it continues.

        Of a job that measures first, before it does: nothing that is found by measuring is in it.
        """
        request = self.request
        live = None
        if request.live is not None:
            seen = request.live
            live = [seen.samples.fingerprint, seen.folds, str(seen.compute_dtype), seen.seed]
        parts: list[Any] = [
            __version__,
            _JOURNAL,
            request.model.checkpoint.fingerprint,
            request.recipe.digest,
            request.statistics.index.digest if request.statistics else None,
            live,
            request.plan.digest if request.plan else None,
            request.device.type,
            request.diagnostics,
        ]
        if request.latencies is not None:
            parts.append(asdict(request.latencies))
        if request.training is not None:
            training = request.training
            parts += [training.samples.fingerprint, str(training.compute_dtype), sorted(training.after)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def provenance(self) -> dict[str, Any]:
        """Where the moments came from, for the report."""
        request = self.request
        if request.statistics is not None and not request.sequential:
            index = request.statistics.index
            return {
                "target": "dense",
                "modality": index.modality,
                "statistics": index.digest,
                **({"data": index.data[0]} if len(index.data) == 1 else {}),
                "samples": index.samples,
                "window": index.window,
                "tokens": index.tokens,
                "folds": index.folds,
                **({} if index.active_above == ACTIVE_THRESHOLD else {"active_above": index.active_above}),
            }
        if request.live is not None:
            samples = request.live.samples
            return {
                "target": request.whole.recipe.target + ("" if request.recipe.true_sequential else ", once per block"),
                "modality": request.model.family.modality,
                "data": samples.fingerprint,
                "samples": len(samples),
                "window": samples.tokens,
                "tokens": len(samples) * samples.tokens,
                "folds": request.live.folds,
            }
        return {"target": "none"}


def settle(request: Request) -> Settled:
    """Check a request, and decide what can be decided before anything is measured or written.

    Raises:
        UserError: with the first thing that does not fit together.
    """
    check_request(request)
    return _decided(request)


def foresee(request: Request) -> Settled:
    """Check a request, and tell of it what can be told without measuring, for a dry run.

    There need not be anything to measure on. Widths that are found by measuring are about as large together as those of
    one ratio everywhere, which stand for them.

    Raises:
        UserError: with the first thing that does not fit together.
    """
    check_fit(request)
    if not request.lacks_moments:
        check_data(request)
    recipe = request.recipe
    if recipe.depth is None and recipe.hidden is None:
        return _foreseen(request)
    left = standing_in(request)
    found = _foreseen(left) if recipe.spaces else _decided(left)
    blocks = recipe.depth is not None and (recipe.joint or recipe.depth.choice is not None)
    dimensions = recipe.hidden is not None and recipe.hidden.auto
    return replace(found, foreseen=found.foreseen or blocks or dimensions)


def _foreseen(request: Request) -> Settled:
    if request.widths_known:
        return _decided(request)
    return Settled(request, _decided(replace(request, recipe=request.recipe.at_one_ratio)).known, foreseen=True)


def _decided(request: Request) -> Settled:
    if request.recipe.depth is not None or request.recipe.hidden is not None:
        return Settled(request, None)
    ranking = ranking_of(request)
    sized = at_size(request, ranking)
    if sized is not request:
        check_enough_samples(sized)  # what depends on the ratio
    if not sized.widths_known:
        return Settled(sized, None)
    decisions = planned(sized.model, sized.plan) if sized.plan is not None else decide(sized, ranking)
    return Settled(sized, (decisions, output_of(sized, decisions.widths(sized.model))))
