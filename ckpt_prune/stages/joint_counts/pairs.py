"""Numbers of whole blocks and of dimensions of the stream held against each other, where units of spaces go besides."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, HiddenRecord, TriedHidden
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.stages.depth.preview import at_depth, last_blocks, wanted_depth
from ckpt_prune.stages.hidden.preview import hidden_record, open_widths
from ckpt_prune.stages.joint_counts.blocks import Choose, Shorten, blocks_chosen, ranked_at
from ckpt_prune.stages.joint_counts.dimensions import Find, Measure, narrowed_trial
from ckpt_prune.stages.joint_counts.search import CountSearch, Trial

LIMIT = 9
"""Pairs that are measured at the most."""
_PARTS = 4
"""The first steps along an axis are so many from none to the most that may go."""

Pair = tuple[int, int]
"""Amounts of two axes."""


def least_pair(
    most: int, most_beside: Callable[[int], int], measure: Callable[[Pair], float | None], limit: int = LIMIT
) -> Pair | None:
    """The pair of the least value that is found from none of either on; of equal ones the one of fewer of the first.

    Pairs beside the best one along each axis are measured, a quarter of what may go apart, until none of them is
    better; then those half as far apart, down to one. Where none of either is no pair that there is, it begins with as
    much as there is of the second alone, and of both.

    Args:
        most: of the first axis.
        most_beside: of the second beside an amount of the first.
        measure: the value of a pair; None where there is no such pair.
        limit: pairs that are measured at the most.

    Returns:
        None where no pair that was measured is one.
    """
    tried: dict[Pair, float | None] = {}

    def best() -> Pair | None:
        found = {pair: value for pair, value in tried.items() if value is not None}
        return min(found, key=lambda pair: (found[pair], pair), default=None)

    def look(pair: Pair) -> None:
        if pair not in tried and len(tried) < limit:
            tried[pair] = measure(pair)

    look((0, 0))
    for pair in ((0, most_beside(0)), (most, most_beside(most))):
        if best() is None:
            look(pair)
    steps = _first_step(most), _first_step(most_beside(0))
    while (here := best()) is not None and len(tried) < limit:
        for pair in _beside(here, steps, most, most_beside):
            look(pair)
        if best() != here:
            continue
        if max(steps) == 1:
            break
        steps = (steps[0] + 1) // 2, (steps[1] + 1) // 2
    return best()


def _first_step(most: int) -> int:
    return max(1, -(-most // _PARTS))


def _beside(here: Pair, steps: Pair, most: int, most_beside: Callable[[int], int]) -> Iterator[Pair]:
    """The pairs one step away from another, as far as there are any; more of an axis before less of it."""
    first, second = here
    for amount in (first + steps[0], first - steps[0]):
        own = min(max(amount, 0), most)
        yield own, min(second, most_beside(own))
    for amount in (second + steps[1], second - steps[1]):
        yield first, min(max(amount, 0), most_beside(first))


@dataclass(frozen=True)
class _Without:
    """The model without so many blocks, its stream as it is.

    Attributes:
        prepared: for what is left to do, with the samples that bases are measured on.
        record: which blocks are gone, and what makes up for them.
        measure: the stream of what is left.
    """

    prepared: Prepared
    record: DepthRecord
    measure: Measure

    @cached_property
    def gram(self) -> Tensor:
        """Of what all norms make of the stream of what is left, (d, d) float64; measured once."""
        return self.measure(self.prepared)


class PairSearch(CountSearch[Pair]):
    """Pairs of a number of blocks, and of steps down to a narrower stream of what is left of them.

    Blocks go first. The basis is that of the model without them, the maps in their place included.

    Args:
        prepared: of a recipe with `depth.drop: auto` and `hidden`, with samples to run.
        statistics: of the unpruned model, with all that widths of the least error are found from.
        choose: which blocks go.
        shorten: what makes up for them.
        measure: the stream of a model.
        find: the basis of a view.
        journal: of the run, in which what was measured of each is entered.
    """

    unit = "axes tried"

    def __init__(
        self,
        prepared: Prepared,
        statistics: Statistics,
        choose: Choose,
        shorten: Shorten,
        measure: Measure,
        find: Find,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(prepared, statistics, journal)
        self._choose, self._shorten, self._measure, self._find = choose, shorten, measure, find
        self._known: dict[int, list[int]] = {}
        self._shorter: dict[int, _Without] = {}

    def named(self, amount: Pair) -> str:
        """Blocks and steps with a colon between."""
        return f"{amount[0]}:{amount[1]}"

    def best(self) -> Pair:
        """The pair that changes the output least, of those that are tried; of equal ones the one of fewer blocks.

        Raises:
            UserError: none of them leaves a model of the size.
        """
        found = least_pair(wanted_depth(self.prepared).count, lambda count: len(self._widths(count)) - 1, self.measured)
        return self.chosen(found)

    def records(self) -> tuple[DepthRecord, HiddenRecord]:
        """The blocks that go, and how many dimensions stay; the second has what was tried.

        Raises:
            UserError: no pair that is tried leaves a model of the size.
        """
        blocks, step = self.best()
        found = [
            TriedHidden(blocks=count, kept=self._widths(count)[own], **tried.model_dump())
            for (count, own), tried in self.fitting
        ]
        hidden = hidden_record(self.prepared, self._widths(blocks)[step]).model_copy(update={"tried": found})
        return blocks_chosen(self.prepared, self.statistics, self._choose, blocks), hidden

    def trial(self, amount: Pair) -> Trial:
        """The model without so many blocks, its stream so many steps narrower."""
        count, step = amount
        without, kept = self._without(count), self._widths(count)[step]
        left, record = without.prepared, without.record
        narrow = narrowed_trial(left, kept, self._find, lambda: without.gram)
        short = replace(narrow, live=None, statistics=self.statistics, ranked=ranked_at(self.ranking, record))
        width = left.model.dimension("hidden")
        what = f"without {count} blocks, with {kept} of {width} dimensions"
        return Trial(short, record.kept, what, own_ends=kept < width)

    def _widths(self, count: int) -> list[int]:
        """Numbers of dimensions that may stay beside so many blocks that go, descending."""
        if count not in self._known:
            self._known[count] = open_widths(last_blocks(self.prepared, count))
        return self._known[count]

    def _without(self, count: int) -> _Without:
        if count not in self._shorter:
            few = replace(self.prepared, live=self.some)
            record, model = self._shorten(few, blocks_chosen(self.prepared, self.statistics, self._choose, count))
            self._shorter[count] = _Without(at_depth(few, record, model), record, self._measure)
        return self._shorter[count]
