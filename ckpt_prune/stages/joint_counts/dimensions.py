"""Numbers of dimensions of the residual stream held against each other, where units of spaces go besides."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import HiddenRecord, TriedHidden
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.stages.hidden.preview import hidden_record, jointly_narrowed, possible_widths, view_of
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint
from ckpt_prune.stages.joint_counts.search import SingleCountSearch, Trial

Measure = Callable[[Prepared], Tensor]
"""A request with samples → the Gram of what all norms make of the stream, (d, d) float64."""
Find = Callable[[SlicedCheckpoint, Tensor], tuple[Tensor, float]]
"""A view of so many dimensions and that Gram → its basis, and the share of the energy that lies in it."""


class DimensionCountSearch(SingleCountSearch):
    """Numbers of dimensions held against each other.

    Args:
        prepared: of a recipe with `hidden.drop: auto`, with samples to run.
        statistics: of the unpruned model, with all that widths of the least error are found from.
        measure: the stream of the unpruned model.
        find: the basis of a view.
        journal: of the run, in which what was measured of each is entered.
    """

    unit = "dimensions tried"

    def __init__(
        self, prepared: Prepared, statistics: Statistics, measure: Measure, find: Find, journal: Journal | None = None
    ) -> None:
        super().__init__(prepared, statistics, journal)
        self._measure, self._find = measure, find
        self._widths = possible_widths(self.prepared)

    @property
    def most(self) -> int:
        """Steps down to a stream that meets the size by itself, or to the narrowest there is."""
        return len(self._widths) - 1

    def record(self) -> HiddenRecord:
        """As many dimensions as change the output least; of equal numbers the most.

        Raises:
            UserError: none leaves a model of the size.
        """
        best = self._widths[self.best()]
        found = [TriedHidden(kept=self._widths[count], **tried.model_dump()) for count, tried in self.fitting]
        return hidden_record(self.prepared, best).model_copy(update={"tried": found})

    def trial(self, count: int) -> Trial:
        """The model whose stream is so many steps narrower, its basis from other samples than it is run on."""
        prepared, kept = self.prepared, self._widths[count]
        narrow = narrowed_trial(prepared, kept, self._find, lambda: self._gram)
        short = replace(narrow, live=None, statistics=self.statistics, ranked=self.ranking)
        what = f"with {kept} of {prepared.model.dimension('hidden')} dimensions"
        return Trial(short, range(prepared.model.blocks), what, own_ends=count > 0)

    @cached_property
    def _gram(self) -> Tensor:
        return self._measure(replace(self.prepared, live=self.some))


def narrowed_trial(prepared: Prepared, kept: int, find: Find, gram: Callable[[], Tensor]) -> Prepared:
    """The request for what is left to do once a stream that is tried has so many dimensions.

    Args:
        prepared: before.
        kept: dimensions; where these are all, nothing is done to it.
        find: the basis of a view.
        gram: of what all norms make of the stream, (d, d) float64.
    """
    record, view = hidden_record(prepared, kept), None
    if kept < record.dimensions:
        bare = view_of(prepared, kept)
        basis, _ = find(bare, gram())
        view = replace(bare, bases=lambda _block: (basis,) * len(bare.sublayers))
    return jointly_narrowed(prepared, record, view)
