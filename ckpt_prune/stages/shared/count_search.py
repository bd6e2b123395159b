"""How many blocks or dimensions to drop besides units: a few counts are tried, and the divergence is measured.

Predicted divergences of blocks, of dimensions of the stream and of units cannot be compared. For a gap they are of
second order in an error as large as the stream's own, without the map that makes up for it; for units they are held-out
errors of single sites. So the model is made for a few counts. The widths of the least predicted error, refitted on the
statistics of the unpruned model, meet the rest of the size. It is run on samples that no refit has seen
(compensation/README.md, section 12).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.budget.curves import total_error
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import DiskError, UserError, find_unreadable_file
from ckpt_prune.common.phases import phase
from ckpt_prune.common.progress import track
from ckpt_prune.job.decisions import Decisions, SiteDecision
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import Tried
from ckpt_prune.job.run import Run
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
from ckpt_prune.stages.shared.measure_dense import measure_first
from ckpt_prune.stages.spaces.effects.site_variants import check_finite, trial_spaces
from ckpt_prune.stages.spaces.pruner import Pruner
from ckpt_prune.stages.spaces.size_search import at_own_size, crossed_spaces
from ckpt_prune.stages.spaces.widths import crossings_of, curves_of, decide, dense_ranking

FIRST, MORE = 5, 2
"""So many counts are tried from none to as many as meet the size alone, and then so many around the best one."""
_UNPRUNED = "statistics of the unpruned model"
"""Entry of the journal."""


def tried_counts(most: int) -> list[int]:
    """Return the counts that are tried first, ascending: none, `most`, and evenly between them."""
    return sorted({round(most * step / (FIRST - 1)) for step in range(FIRST)})


def counts_beside(best: int, tried: Sequence[int]) -> list[int]:
    """Return the counts that are tried next: halfway between the best one and its neighbours that were tried."""
    below, above = [count for count in tried if count < best], [count for count in tried if count > best]
    return sorted({(best + end) // 2 for end in (*below[-1:], *above[:1])} - set(tried))[:MORE]


@dataclass(frozen=True)
class Trial:
    """A model without some blocks or dimensions, its units still whole.

    Attributes:
        short: the state for what is left to do, with its sites ranked, and nothing to run.
        numbers: of its blocks in the dense model.
        description: of what it lacks.
        predicted: divergence that what is gone will cause; None if unknown.
        own_ends: True if embedding, final norm and head are not the dense model's.
    """

    short: Prepared
    numbers: Sequence[int]
    description: str
    predicted: float | None = None
    own_ends: bool = False


class CountSearch(ABC):
    """Compares counts of blocks, or of steps down to a narrower stream, by the divergence of the model's output.

    Args:
        prepared: of a recipe that leaves the count open, with samples to run.
        statistics: of the unpruned model, with all that widths of the least error need.
        run: in whose journal the divergence of each count is recorded.
    """

    entry: str
    """Before a count, in entries of the journal."""

    def __init__(self, prepared: Prepared, statistics: Statistics, run: Run) -> None:
        self.prepared, self.statistics, self.run = at_own_size(prepared), statistics, run
        spaces = replace(self.prepared, recipe=self.prepared.recipe.spaces_alone, statistics=statistics)
        self.ranking = dense_ranking(spaces)
        self.tried: dict[int, Tried | None] = {}
        self.refusal: UserError | None = None

    @property
    @abstractmethod
    def most(self) -> int:
        """The count that meets the size by itself, or all that may go."""

    @abstractmethod
    def trial(self, count: int) -> Trial:
        """Return the model without so much; UserError if there is none."""

    def best(self) -> int:
        """Return the count that changes the output least; of equal ones the least.

        Raises:
            UserError: none leaves a model of the size; the reason is that of the last one tried.
        """
        first = tried_counts(self.most)
        best = self._least(first)
        if best is not None:
            best = self._least([*first, *counts_beside(best, first)])
        if best is None:
            assert self.refusal is not None
            raise self.refusal
        return best

    def _least(self, counts: Sequence[int]) -> int | None:
        divergences = {count: value for count in counts if (value := self._divergence(count)) is not None}
        return min(divergences, key=lambda count: (divergences[count], count), default=None)

    @property
    def fitting(self) -> list[tuple[int, Tried]]:
        """Counts that leave a model of the size, ascending, with their divergences."""
        return [(count, tried) for count, tried in sorted(self.tried.items()) if tried is not None]

    def _divergence(self, count: int) -> float | None:
        """Measure the divergence of a model without so much, whose units meet the size; None if there is none."""
        if count not in self.tried:
            self.tried[count] = self._recorded_or_tried(count)
        tried = self.tried[count]
        return None if tried is None else tried.measured

    def _recorded_or_tried(self, count: int) -> Tried | None:
        def try_count() -> Tried:
            trial = self.trial(count)
            decisions = decide(trial.short)
            predicted = None if trial.predicted is None else trial.predicted + _predict_sites(trial.short, decisions)
            return Tried(predicted=predicted, measured=self._measure(trial, decisions))

        try:
            return self.run.remember(f"{self.entry} {count}", Tried, try_count)
        except UserError as error:
            if find_unreadable_file(error) is not None or isinstance(error, DiskError):
                raise  # that says nothing of the count
            # Too small for the size, or without something that the class needs: other counts may work. This is not
            # recorded, so that a resumed run meets the error again and can raise it if no count works.
            self.refusal = error
            return None

    # ---- running it ----------------------------------------------------------------------------------------------

    @property
    def fitted(self) -> LiveSamples:
        """The samples that maps and bases are fitted to here, which are not those that models are run on."""
        live, most = self.prepared.live_samples, LIMITS[self.prepared.model.family.modality]
        last = split_folds(len(live.samples), live.folds)[-1]
        count = min(last.start if last.start > 1 else last.stop, most)
        return replace(live, samples=SampleRange(live.samples, 0, count), folds=min(live.folds, count))

    @property
    def _unseen(self) -> Samples:
        """The samples that models are run on: those at the start of the last fold."""
        live, most = self.prepared.live_samples, LIMITS[self.prepared.model.family.modality]
        last = split_folds(len(live.samples), live.folds)[-1]
        return SampleRange(live.samples, last.start, min(last.stop, last.start + most))

    def _stream(self, model: Model) -> HiddenStream:
        live, device = self.prepared.live_samples, self.prepared.device
        return open_stream(model, self._unseen, device=device, compute_dtype=live.compute_dtype, allocate=live.allocate)

    @cached_property
    def _dense(self) -> tuple[Readout, Tensor]:
        """The dense model's last hidden states of the samples, and what makes outputs of them; run once."""
        model = self.prepared.model
        stream = self._stream(model)
        for block in range(model.blocks):
            stream.advance(block, model.read_block(block))
        return stream.readout(), stream.states

    def _measure(self, trial: Trial, decisions: Decisions) -> float:
        model = trial.short.model
        stream = self._stream(model)
        for block in track(range(model.blocks), trial.description, total=model.blocks):
            stream.advance(block, self._prune(trial, block, decisions))
        readout, states = self._dense
        trial_readout = stream.readout() if trial.own_ends else readout
        (value,) = measure_divergences(readout, states, self._unseen, [(trial_readout, stream.states)])
        check_finite(value, f"the output {trial.description}", self.prepared.live_samples.compute_dtype)
        return value

    @torch.no_grad()
    def _prune(self, trial: Trial, block: int, decisions: Decisions) -> Mapping[str, Tensor]:
        """Return a block with its sites pruned and refitted on all folds but the last, or on the only one."""
        short = trial.short
        model, tensors = short.model, short.model.read_block(block)
        spaces = [space for space in short.recipe.spaces if space in model.spaces(block)]
        decided = {space: decisions.of(model, Site(block, space)) for space in spaces}
        pruned = [space for space, decision in decided.items() if decision.keep < model.units(space, block)]
        if not pruned:
            return tensors
        source: Any = CachedMoments(self.statistics, self.prepared.model)
        by_space = source.moments(trial.numbers[block], {}, pruned)
        moments: Any = {space: (sum_folds(folds[:-1] or folds).to(short.device),) for space, folds in by_space.items()}
        values = {"version": 1, "name": "tried", "spaces": trial_spaces(model, block, pruned, tensors)}
        sites = {
            Site(block, space): SiteDecision(decided[space].keep, scores=decided[space].scores) for space in pruned
        }
        pruner = Pruner(model, Decisions(FullRecipe.model_validate(values), sites), frozenset(), short.device)
        return pruner.block(block, tensors, KnownMoments(moments))[0]


def measure_unpruned(prepared: Prepared, run: Run) -> Statistics:
    """Return statistics of the unpruned model to compare counts by, measured if there are none."""
    if prepared.statistics is not None:
        return prepared.statistics
    folder = run.scratch / "whole"
    if _UNPRUNED in run.own_journal.entries:
        return Statistics(folder)
    with run.timer.time("measuring"), phase("calibration"):
        plain = replace(prepared, recipe=prepared.recipe.spaces_alone)
        statistics = measure_first(plain, prepared.live_samples, folder, None)
    with disk_failures(folder):
        run.own_journal.record(_UNPRUNED)
    return statistics


def _predict_sites(prepared: Prepared, decisions: Decisions) -> float:
    assert prepared.ranked is not None
    assert prepared.recipe.size is not None
    kind = prepared.recipe.size.kind
    curves = curves_of(prepared, prepared.ranked, kind)
    kept = {site: decisions.of(prepared.model, site).keep for site in curves}
    return total_error(curves, kept, crossings_of(curves, crossed_spaces(prepared, kind)))
