"""Numbers of whole blocks and of dimensions of the stream held against each other, where units of spaces go besides."""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, HiddenRecord, TriedHidden
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.stages.amounts.blocks import Choose, Shorten, blocks_chosen, ranked_at
from ckpt_prune.stages.amounts.dimensions import Find, Measure, narrowed_trial
from ckpt_prune.stages.amounts.pair_search import Pair, least_pair
from ckpt_prune.stages.amounts.search import Trial, Weighing
from ckpt_prune.stages.depth.preview import at_depth, last_blocks, wanted_depth
from ckpt_prune.stages.hidden.preview import hidden_record, open_widths


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


class AxesWeighing(Weighing[Pair]):
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
