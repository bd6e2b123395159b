"""Searches for the number of blocks to drop besides units."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_prune.job.prepared import RankedSites, RankedUnits
from ckpt_prune.job.records import DepthRecord, TriedDepth
from ckpt_prune.model.spaces import Site
from ckpt_prune.stages.depth.choice import choose_depth
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.depth.maps import compensate, remaining_model
from ckpt_prune.stages.depth.preview import at_depth, wanted_depth
from ckpt_prune.stages.shared.count_search import CountSearch, Trial


class BlockCountSearch(CountSearch):
    """Compares numbers of blocks to drop, for a recipe with `depth.drop: auto`."""

    entry = "depth tried"

    @property
    def most(self) -> int:
        return wanted_depth(self.prepared).count

    def record(self) -> DepthRecord:
        """Return the blocks that go, and what was tried."""
        chosen = self._choose_blocks(self.best())
        return chosen.model_copy(
            update={"tried": [TriedDepth(blocks=count, **tried.model_dump()) for count, tried in self.fitting]}
        )

    def trial(self, count: int) -> Trial:
        record = self._choose_blocks(count)
        file = self.run.scratch / f"without-{record.blocks - len(record.kept)}.safetensors"
        record = compensate(replace(self.prepared, live=self.fitted), record, file)
        model = remaining_model(self.prepared.model, record, file)
        bare = replace(at_depth(self.prepared, record, model), live=None, statistics=self.statistics)
        short = bare.knowing(RankedSites(ranked_at(self.ranking, record)))
        gaps = [gap.divergence for gap in record.gaps]
        predicted = None if None in gaps else sum(value for value in gaps if value is not None)
        return Trial(short, record.kept, f"without {record.blocks - model.blocks} blocks", predicted)

    def _choose_blocks(self, count: int) -> DepthRecord:
        recipe, depth = self.prepared.recipe, self.prepared.stage(Depth)
        fixed = depth.model_copy(update={"drop": count} if count else {"drop": None, "blocks": []})
        fixed_recipe = recipe.model_copy(update={"depth": fixed})
        return choose_depth(replace(self.prepared, recipe=fixed_recipe, statistics=self.statistics))


def ranked_at(ranking: Mapping[Site, Sequence[RankedUnits]], record: DepthRecord) -> dict[Site, Sequence[RankedUnits]]:
    """Return the ranking of the blocks that stay, by their new numbers."""
    places = {old: new for new, old in enumerate(record.kept)}
    return {site._replace(block=places[site.block]): curve for site, curve in ranking.items() if site.block in places}
