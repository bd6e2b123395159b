"""Numbers of whole blocks held against each other, where units of spaces go besides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.job.prepared import Prepared, RankedUnits
from ckpt_prune.job.records import DepthRecord, TriedDepth
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site
from ckpt_prune.stages.depth.preview import at_depth, depth_of, wanted_depth
from ckpt_prune.stages.joint_counts.search import SingleCountSearch, Trial

Shorten = Callable[[Prepared, DepthRecord], tuple[DepthRecord, Model]]
"""A request and which blocks go → the record of what makes up for them, and the model that is left."""
Choose = Callable[[Prepared], DepthRecord]
"""A request with a number of blocks to drop → which ones."""


class BlockCountSearch(SingleCountSearch):
    """Numbers of blocks held against each other.

    Args:
        prepared: of a recipe with `depth.drop: auto`, with samples to run.
        statistics: of the unpruned model, with all that widths of the least error are found from.
        choose: which blocks go.
        shorten: what makes up for them.
        journal: of the run, in which what was measured of each is entered.
    """

    unit = "depth tried"

    def __init__(
        self,
        prepared: Prepared,
        statistics: Statistics,
        choose: Choose,
        shorten: Shorten,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(prepared, statistics, journal)
        self._choose, self._shorten = choose, shorten

    @property
    def most(self) -> int:
        """Blocks that meet the size by themselves, or all that may go."""
        return wanted_depth(self.prepared).count

    def record(self) -> DepthRecord:
        """The blocks that go, of the number that changes the output least; of equal ones the fewest.

        Raises:
            UserError: no number of blocks leaves a model of the size.
        """
        chosen = blocks_chosen(self.prepared, self.statistics, self._choose, self.best())
        found = [TriedDepth(blocks=count, **tried.model_dump()) for count, tried in self.fitting]
        return chosen.model_copy(update={"tried": found})

    def trial(self, count: int) -> Trial:
        """The model without so many blocks, with what makes up for them."""
        few = replace(self.prepared, live=self.some)
        record, model = self._shorten(few, blocks_chosen(self.prepared, self.statistics, self._choose, count))
        bare = replace(at_depth(self.prepared, record, model), live=None, statistics=self.statistics)
        short = replace(bare, ranked=ranked_at(self.ranking, record))
        told = [gap.divergence for gap in record.gaps]
        predicted = None if None in told else sum(each for each in told if each is not None)
        return Trial(short, record.kept, f"without {record.blocks - model.blocks} blocks", predicted)


def blocks_chosen(prepared: Prepared, statistics: Statistics, choose: Choose, count: int) -> DepthRecord:
    """Which blocks go, of so many.

    Args:
        prepared: of a recipe that leaves open how many.
        statistics: of the unpruned model.
        choose: which ones.
        count: how many; none of them may be.
    """
    recipe, depth = prepared.recipe, depth_of(prepared)
    fixed = depth.model_copy(update={"drop": count} if count else {"drop": None, "blocks": []})
    return choose(replace(prepared, recipe=recipe.model_copy(update={"depth": fixed}), statistics=statistics))


def ranked_at(ranking: Mapping[Site, Sequence[RankedUnits]], record: DepthRecord) -> dict[Site, Sequence[RankedUnits]]:
    """What is known of the sites of the blocks that stay, by their new numbers."""
    places = {old: new for new, old in enumerate(record.kept)}
    return {site._replace(block=places[site.block]): own for site, own in ranking.items() if site.block in places}
