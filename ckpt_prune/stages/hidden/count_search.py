"""Searches for the number of dimensions of the residual stream to keep besides units."""

from dataclasses import replace
from functools import cached_property

from torch import Tensor

from ckpt_prune.job.prepared import Prepared, RankedSites
from ckpt_prune.job.run import Run
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.stages.hidden.preview import hidden_record, narrow_jointly, possible_widths, view_of
from ckpt_prune.stages.hidden.records import HiddenRecord, TriedHidden
from ckpt_prune.stages.hidden.shared_basis import shared_basis, shared_gram
from ckpt_prune.stages.shared.count_search import CountSearch, Trial


class DimensionCountSearch(CountSearch):
    """Compares numbers of dimensions of the stream to keep, for a recipe with `hidden.drop: auto`.

    Bases come from other samples than the model is run on.
    """

    entry = "dimensions tried"

    def __init__(self, prepared: Prepared, statistics: Statistics, run: Run) -> None:
        super().__init__(prepared, statistics, run)
        self._widths = possible_widths(self.prepared)

    @property
    def most(self) -> int:
        return len(self._widths) - 1

    def record(self) -> HiddenRecord:
        """Return how many dimensions stay, and what was tried."""
        best = self._widths[self.best()]
        tried = [TriedHidden(kept=self._widths[count], **tried.model_dump()) for count, tried in self.fitting]
        return hidden_record(self.prepared, best).model_copy(update={"tried": tried})

    def trial(self, count: int) -> Trial:
        prepared, kept = self.prepared, self._widths[count]
        record, view = hidden_record(prepared, kept), None
        if kept < record.dimensions:
            bare = view_of(prepared, kept)
            basis, _ = shared_basis(bare, self._gram)
            view = replace(bare, bases=lambda _block: (basis,) * len(bare.sublayers))
        narrow = narrow_jointly(prepared, record, view)
        short = replace(narrow.knowing(RankedSites(self.ranking)), live=None, statistics=self.statistics)
        description = f"with {kept} of {prepared.model.dimension('hidden')} dimensions"
        return Trial(short, range(prepared.model.blocks), description, own_ends=count > 0)

    @cached_property
    def _gram(self) -> Tensor:
        return shared_gram(replace(self.prepared, live=self.fitted))
