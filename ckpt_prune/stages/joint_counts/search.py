"""How much goes of one axis where units of spaces go besides: by what a few amounts do to the model's own output.

Predicted divergences of blocks, or of dimensions of the stream, and of units are on different footings: of a gap they
are of second order in an error as large as the stream's own, without the map that makes up for it; of units they are
held-out errors of single sites. Their sum compares nothing. So the model is made with a few amounts gone and the rest
of the size met by the widths of the least predicted error, refitted on the statistics of the unpruned model, and run on
samples that no refit has seen (compensation/README.md, section 12).
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import DiskError, UserError, find_unreadable_file
from ckpt_prune.common.phases import phase
from ckpt_prune.common.progress import track
from ckpt_prune.job.decisions import Decision, Decisions
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.job.prepared import Prepared, RankedUnits
from ckpt_prune.job.records import Tried
from ckpt_prune.job.timing import Stages
from ckpt_prune.measure.moment_sources import CachedMoments, KnownMoments
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.samples.samples import SampleRange, Samples
from ckpt_prune.measure.statistics.fisher import LIMITS
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream, split_folds
from ckpt_prune.measure.streams.readout import Readout, measure_divergences
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.budget import total_error
from ckpt_prune.stages.spaces.effects.site_variants import check_finite, trial_spaces
from ckpt_prune.stages.spaces.measure_dense import measure_first
from ckpt_prune.stages.spaces.pruner import Pruner
from ckpt_prune.stages.spaces.size_search import at_own_size
from ckpt_prune.stages.spaces.widths import crossings_of, curves_of, decide, dense_ranking

FIRST, MORE = 5, 2
"""Amounts that are tried: so many from none to as much as meets the size by itself, and then so many between the best
one and those beside it."""
_WHOLE = "statistics of the unpruned model"
"""Unit of the journal: what amounts are held against each other by."""


Amount = TypeVar("Amount", bound=Hashable)
"""What is held against each other: a number of one axis, or one of each of two."""


def tried_counts(most: int) -> list[int]:
    """Amounts that are tried first, ascending: none, `most`, and evenly between them."""
    return sorted({round(most * step / (FIRST - 1)) for step in range(FIRST)})


def counts_beside(best: int, tried: Sequence[int]) -> list[int]:
    """Amounts that are tried then: halfway between the best one and those tried beside it."""
    below, above = [count for count in tried if count < best], [count for count in tried if count > best]
    ends = [*([max(below)] if below else []), *([min(above)] if above else [])]
    return sorted({(best + end) // 2 for end in ends} - set(tried))[:MORE]


@dataclass(frozen=True)
class Trial:
    """A model without some amount of an axis, its units still whole.

    Attributes:
        short: the request for what is left to do, with its sites ranked, and nothing to run.
        numbers: of its blocks in the dense model.
        what: it lacks, in words.
        predicted: of what is gone, to be done to the model's output; None where it is not known.
        own_ends: whether embedding, final norm and head are not the dense model's.
    """

    short: Prepared
    numbers: Sequence[int]
    what: str
    predicted: float | None = None
    own_ends: bool = False


class CountSearch(ABC, Generic[Amount]):
    """Amounts of an axis, or of several, held against each other.

    Args:
        prepared: of a recipe that leaves open how much goes, with samples to run.
        statistics: of the unpruned model, with all that widths of the least error are found from.
        journal: of the run, in which what was measured of each is entered.
    """

    unit: str
    """Before an amount, of units of the journal."""

    def __init__(self, prepared: Prepared, statistics: Statistics, journal: Journal | None = None) -> None:
        self.prepared, self.statistics, self.journal = at_own_size(prepared), statistics, journal
        self.ranking = ranking_of(self.prepared, statistics)
        self.tried: dict[Amount, Tried | None] = {}
        self.why: UserError | None = None

    @abstractmethod
    def trial(self, amount: Amount) -> Trial:
        """The model without so much.

        Raises:
            UserError: there is none.
        """

    @property
    def fitting(self) -> list[tuple[Amount, Tried]]:
        """Amounts that leave a model of the size, ascending, and what they do."""
        return [(amount, tried) for amount, tried in sorted(self.tried.items()) if tried is not None]

    @abstractmethod
    def best(self) -> Amount:
        """The amount that changes the output least.

        Raises:
            UserError: none leaves a model of the size.
        """

    def named(self, amount: Amount) -> str:
        """An amount in a unit of the journal: without a space."""
        return str(amount)

    def measured(self, amount: Amount) -> float | None:
        """The divergence of a model without so much, whose units meet the size; None where there is none.

        Raises:
            UserError: a file could not be read or written, which says nothing of the amount.
        """
        if amount not in self.tried:
            self.tried[amount] = self._known_or_tried(amount)
        tried = self.tried[amount]
        return None if tried is None else tried.measured

    def _known_or_tried(self, amount: Amount) -> Tried | None:
        known = {} if self.journal is None else self.journal.notes
        unit = f"{self.unit} {self.named(amount)}"
        if known.get(unit) is not None:
            return Tried.model_validate(known[unit])
        try:
            tried = self._tried(amount)
        except UserError as error:
            if find_unreadable_file(error) is not None or isinstance(error, DiskError):
                raise
            # Too little for the size, or such as the class cannot do without: others may do. A run that goes on is told
            # again, so that it can say why where none does.
            self.why = error
            return None
        if self.journal is not None:
            with disk_failures(self.journal.folder):
                self.journal.record(unit, note=tried.model_dump(mode="json"))
        return tried

    def chosen(self, best: Amount | None) -> Amount:
        """The best amount, where there is any.

        Raises:
            UserError: none leaves a model of the size; why the last one did not.
        """
        if best is None:
            assert self.why is not None
            raise self.why
        return best

    def _tried(self, amount: Amount) -> Tried:
        trial = self.trial(amount)
        decisions = decide(trial.short)
        predicted = None if trial.predicted is None else trial.predicted + _predicted(trial.short, decisions)
        return Tried(predicted=predicted, measured=self._divergence(trial, decisions))

    # ---- running it ----------------------------------------------------------------------------------------------

    @property
    def _live(self) -> LiveSamples:
        assert self.prepared.live is not None
        return self.prepared.live

    @property
    def some(self) -> LiveSamples:
        """The samples that whatever makes up for what is gone is fitted to here: not those that models are run on."""
        live, most = self._live, LIMITS[self.prepared.model.family.modality]
        last = split_folds(len(live.samples), live.folds)[-1]
        count = min(last.start if last.start > 1 else last.stop, most)
        return replace(live, samples=SampleRange(live.samples, 0, count), folds=min(live.folds, count))

    @property
    def _unseen(self) -> Samples:
        """The samples that models are run on: those at the start of the last fold."""
        live, most = self._live, LIMITS[self.prepared.model.family.modality]
        last = split_folds(len(live.samples), live.folds)[-1]
        return SampleRange(live.samples, last.start, min(last.stop, last.start + most))

    def _stream(self, model: Model) -> HiddenStream:
        live = self._live
        return open_stream(
            model, self._unseen, device=self.prepared.device, compute_dtype=live.compute_dtype, allocate=live.allocate
        )

    @cached_property
    def _dense(self) -> tuple[Readout, Tensor]:
        """What the dense model makes of the samples, run once."""
        model = self.prepared.model
        stream = self._stream(model)
        for block in range(model.blocks):
            stream.advance(block, model.read_block(block))
        return stream.readout(), stream.states

    def _divergence(self, trial: Trial, decisions: Decisions) -> float:
        model = trial.short.model
        stream = self._stream(model)
        for block in track(range(model.blocks), trial.what, total=model.blocks):
            stream.advance(block, self._pruned(trial, block, decisions))
        readout, states = self._dense
        own = stream.readout() if trial.own_ends else readout
        (value,) = measure_divergences(readout, states, self._unseen, [(own, stream.states)])
        check_finite(value, f"the output {trial.what}", self._live.compute_dtype)
        return value

    @torch.no_grad()
    def _pruned(self, trial: Trial, block: int, decisions: Decisions) -> Mapping[str, Tensor]:
        """A block with its sites pruned and refitted on all folds but the last, or the only one."""
        short = trial.short
        model, whole, tensors = short.model, self.prepared.model, short.model.read_block(block)
        own = {space: decisions.of(model, Site(block, space)) for space in short.recipe.spaces}
        pruned = [space for space, decision in own.items() if decision.keep < model.units(space)]
        if not pruned:
            return tensors
        read: Any = CachedMoments(self.statistics, whole).moments(trial.numbers[block], {}, pruned)
        moments: Any = {space: (sum_folds(folds[:-1] or folds).to(short.device),) for space, folds in read.items()}
        recipe = FullRecipe.model_validate(
            {"version": 1, "name": "tried", "spaces": trial_spaces(model, block, pruned, tensors)}
        )
        sites = {Site(block, space): Decision(own[space].keep, scores=own[space].scores) for space in pruned}
        pruner = Pruner(model, Decisions(recipe, sites), frozenset(), short.device)
        return pruner.block(block, tensors, KnownMoments(moments))[0]


class SingleCountSearch(CountSearch[int]):
    """Amounts of one axis held against each other."""

    @property
    @abstractmethod
    def most(self) -> int:
        """What meets the size by itself, or all that may go."""

    def best(self) -> int:
        """The amount that changes the output least; of equal ones the least.

        Raises:
            UserError: none leaves a model of the size.
        """
        first = tried_counts(self.most)
        best = self._least(first)
        if best is not None:
            best = self._least([*first, *counts_beside(best, first)])
        return self.chosen(best)

    def _least(self, counts: Sequence[int]) -> int | None:
        told = {count: value for count in counts if (value := self.measured(count)) is not None}
        return min(told, key=lambda count: (told[count], count), default=None)


def measure_unpruned(prepared: Prepared, folder: Path, journal: Journal, stages: Stages) -> Statistics:
    """Statistics of the unpruned model that amounts are held against each other by: measured, where they were not.

    Args:
        prepared: of the whole job, with samples.
        folder: where they are kept.
        journal: of the run.
        stages: of the run.
    """
    if prepared.statistics is not None:
        return prepared.statistics
    if _WHOLE in journal.units:
        return Statistics(folder)
    assert prepared.live is not None
    with stages.stage("measuring"), phase("calibration"):
        plain = replace(prepared, recipe=prepared.recipe.spaces_alone)
        statistics = measure_first(plain, prepared.live, folder, None)
    with disk_failures(folder):
        journal.record(_WHOLE)
    return statistics


def ranking_of(prepared: Prepared, statistics: Statistics) -> Mapping[Site, Sequence[RankedUnits]]:
    """Every site's units in the dense model, and what fewer of them lose, for a recipe with spaces."""
    return dense_ranking(replace(prepared, recipe=prepared.recipe.spaces_alone, statistics=statistics))


def _predicted(prepared: Prepared, decisions: Decisions) -> float:
    """What the sites are predicted to lose."""
    assert prepared.ranked is not None
    assert prepared.recipe.size is not None
    kind = prepared.recipe.size.kind
    curves = curves_of(prepared, prepared.ranked, kind)
    return total_error(
        curves, {site: decisions.of(prepared.model, site).keep for site in curves}, crossings_of(prepared, curves, kind)
    )
