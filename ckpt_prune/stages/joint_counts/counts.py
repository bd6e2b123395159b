"""Searches for the number of blocks, of dimensions of the stream, and of both, to drop besides units."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ckpt_prune.job.prepared import Prepared, RankedSites, RankedUnits
from ckpt_prune.job.records import DepthRecord, HiddenRecord, TriedDepth, TriedHidden
from ckpt_prune.job.run import Run
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site
from ckpt_prune.stages.depth.choice import choose_depth
from ckpt_prune.stages.depth.maps import compensate, remaining_model
from ckpt_prune.stages.depth.preview import at_depth, depth_of, last_blocks, wanted_depth
from ckpt_prune.stages.hidden.preview import hidden_record, narrow_jointly, open_widths, possible_widths, view_of
from ckpt_prune.stages.hidden.shared_basis import shared_basis, shared_gram
from ckpt_prune.stages.joint_counts.search import CountSearch, SingleCountSearch, Trial

Pair = tuple[int, int]
"""A number of blocks, and of steps down to a narrower stream."""

LIMIT = 9
"""So many pairs are measured at most."""
_PARTS = 4
"""The first step along an axis is this part of what may go."""


class BlockCountSearch(SingleCountSearch):
    """Compares numbers of blocks to drop, for a recipe with `depth.drop: auto`."""

    entry = "depth tried"

    @property
    def most(self) -> int:
        return wanted_depth(self.prepared).count

    def record(self) -> DepthRecord:
        """Return the blocks that go, and what was tried."""
        chosen = _choose_blocks(self.prepared, self.statistics, self.best())
        return chosen.model_copy(
            update={"tried": [TriedDepth(blocks=count, **tried.model_dump()) for count, tried in self.fitting]}
        )

    def trial(self, count: int) -> Trial:
        record, model = _shorten(self, count)
        bare = replace(at_depth(self.prepared, record, model), live=None, statistics=self.statistics)
        short = bare.knowing(RankedSites(ranked_at(self.ranking, record)))
        gaps = [gap.divergence for gap in record.gaps]
        predicted = None if None in gaps else sum(value for value in gaps if value is not None)
        return Trial(short, record.kept, f"without {record.blocks - model.blocks} blocks", predicted)


def _choose_blocks(prepared: Prepared, statistics: Statistics, count: int) -> DepthRecord:
    recipe, depth = prepared.recipe, depth_of(prepared)
    fixed = depth.model_copy(update={"drop": count} if count else {"drop": None, "blocks": []})
    return choose_depth(replace(prepared, recipe=recipe.model_copy(update={"depth": fixed}), statistics=statistics))


def _shorten(search: CountSearch[Any], count: int) -> tuple[DepthRecord, Model]:
    """Drop so many blocks: return the record of what makes up for them, and the model that is left."""
    record = _choose_blocks(search.prepared, search.statistics, count)
    file = search.run.scratch / f"without-{record.blocks - len(record.kept)}.safetensors"
    few = replace(search.prepared, live=search.fitted)
    record = compensate(few, record, file)
    return record, remaining_model(few.model, record, file)


def ranked_at(ranking: Mapping[Site, Sequence[RankedUnits]], record: DepthRecord) -> dict[Site, Sequence[RankedUnits]]:
    """Return the ranking of the blocks that stay, by their new numbers."""
    places = {old: new for new, old in enumerate(record.kept)}
    return {site._replace(block=places[site.block]): own for site, own in ranking.items() if site.block in places}


class DimensionCountSearch(SingleCountSearch):
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
        narrow = _narrow(prepared, kept, lambda: self._gram)
        short = replace(narrow.knowing(RankedSites(self.ranking)), live=None, statistics=self.statistics)
        description = f"with {kept} of {prepared.model.dimension('hidden')} dimensions"
        return Trial(short, range(prepared.model.blocks), description, own_ends=count > 0)

    @cached_property
    def _gram(self) -> Tensor:
        return shared_gram(replace(self.prepared, live=self.fitted))


def _narrow(prepared: Prepared, kept: int, gram: Callable[[], Tensor]) -> Prepared:
    """Return the state for what is left to do once the stream has so many dimensions, which may be all."""
    record, view = hidden_record(prepared, kept), None
    if kept < record.dimensions:
        bare = view_of(prepared, kept)
        basis, _ = shared_basis(bare, gram())
        view = replace(bare, bases=lambda _block: (basis,) * len(bare.sublayers))
    return narrow_jointly(prepared, record, view)


def least_pair(
    most: int, most_beside: Callable[[int], int], measure: Callable[[Pair], float | None], limit: int = LIMIT
) -> Pair | None:
    """Search for the pair of the least value; of equal ones the one with less of the first. None if there is no pair.

    It starts from none of either. Pairs next to the best one along each axis are measured, a quarter of what may go
    apart, until none of them is better; then those half as far apart, down to one. If none of either is not possible,
    it starts with as much as possible of the second alone, and of both.

    Args:
        most: of the first axis.
        most_beside: of the second beside an amount of the first.
        measure: the value of a pair; None if there is no such pair.
        limit: so many pairs are measured at most.
    """
    tried: dict[Pair, float | None] = {}

    def best() -> Pair | None:
        values = {pair: value for pair, value in tried.items() if value is not None}
        return min(values, key=lambda pair: (values[pair], pair), default=None)

    def look(pair: Pair) -> None:
        if pair not in tried and len(tried) < limit:
            tried[pair] = measure(pair)

    look((0, 0))
    for pair in ((0, most_beside(0)), (most, most_beside(most))):
        if best() is None:
            look(pair)
    steps = max(1, -(-most // _PARTS)), max(1, -(-most_beside(0) // _PARTS))
    while (here := best()) is not None and len(tried) < limit:
        for pair in _neighbours(here, steps, most, most_beside):
            look(pair)
        if best() != here:
            continue
        if max(steps) == 1:
            break
        steps = (steps[0] + 1) // 2, (steps[1] + 1) // 2
    return best()


def _neighbours(here: Pair, steps: Pair, most: int, most_beside: Callable[[int], int]) -> Iterator[Pair]:
    """Yield the pairs one step away, within limits; more of an axis before less of it."""
    first, second = here
    for amount in (first + steps[0], first - steps[0]):
        first_count = min(max(amount, 0), most)
        yield first_count, min(second, most_beside(first_count))
    for amount in (second + steps[1], second - steps[1]):
        yield first, min(max(amount, 0), most_beside(first))


@dataclass(frozen=True)
class _Shorter:
    """The model without some blocks, its stream as it is, with the samples that bases are measured on."""

    prepared: Prepared
    record: DepthRecord

    @cached_property
    def gram(self) -> Tensor:
        return shared_gram(self.prepared)


class PairSearch(CountSearch[Pair]):
    """Compares pairs of counts, for a recipe with `depth.drop: auto` and `hidden`.

    Blocks go first. The basis is that of the model without them, with the maps in their place.
    """

    entry = "axes tried"

    def __init__(self, prepared: Prepared, statistics: Statistics, run: Run) -> None:
        super().__init__(prepared, statistics, run)
        self._widths_by_count: dict[int, list[int]] = {}
        self._shorter_models: dict[int, _Shorter] = {}

    def name(self, count: Pair) -> str:
        return f"{count[0]}:{count[1]}"

    def best(self) -> Pair:
        """Return the tried pair that changes the output least; of equal ones the one of fewer blocks."""
        most = wanted_depth(self.prepared).count
        return self.check_found(least_pair(most, lambda blocks: len(self._widths(blocks)) - 1, self.divergence))

    def records(self) -> tuple[DepthRecord, HiddenRecord]:
        """Return the blocks that go, and how many dimensions stay, with what was tried."""
        blocks, step = self.best()
        tried = [
            TriedHidden(blocks=count, kept=self._widths(count)[own], **figures.model_dump())
            for (count, own), figures in self.fitting
        ]
        hidden = hidden_record(self.prepared, self._widths(blocks)[step]).model_copy(update={"tried": tried})
        return _choose_blocks(self.prepared, self.statistics, blocks), hidden

    def trial(self, count: Pair) -> Trial:
        blocks, step = count
        shorter, kept = self._without(blocks), self._widths(blocks)[step]
        narrow = _narrow(shorter.prepared, kept, lambda: shorter.gram)
        ranking = ranked_at(self.ranking, shorter.record)
        short = replace(narrow.knowing(RankedSites(ranking)), live=None, statistics=self.statistics)
        width = shorter.prepared.model.dimension("hidden")
        description = f"without {blocks} blocks, with {kept} of {width} dimensions"
        return Trial(short, shorter.record.kept, description, own_ends=kept < width)

    def _widths(self, blocks: int) -> list[int]:
        """Return the numbers of dimensions that may stay if so many blocks go, descending."""
        if blocks not in self._widths_by_count:
            self._widths_by_count[blocks] = open_widths(last_blocks(self.prepared, blocks))
        return self._widths_by_count[blocks]

    def _without(self, blocks: int) -> _Shorter:
        if blocks not in self._shorter_models:
            record, model = _shorten(self, blocks)
            few = replace(self.prepared, live=self.fitted)
            self._shorter_models[blocks] = _Shorter(at_depth(few, record, model), record)
        return self._shorter_models[blocks]
