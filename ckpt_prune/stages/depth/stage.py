"""The work of the stage `depth`: whole blocks go, before anything else is done to those that stay."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.depth.preview import check_depth, check_samples, drop_any_blocks
from ckpt_prune.stages.depth.run import drop_blocks
from ckpt_prune.stages.depth.show import name_gone
from ckpt_prune.stages.shared.extremes import fewest
from ckpt_prune.stages.spaces.checks import check_folds


class DepthStage(Stage[Depth]):
    """Drops whole blocks, or the attention or mlp of some.

        version: 1
        name: shorter
        depth: {drop: 4, choose: cosine, compensation: {method: linear}}

    In order: `check` refuses numbers that the model does not have, and `check_data` and `check_training` data that
    cannot choose. `preview` takes placeholders out. `run` measures, chooses the blocks and fits the map in their place.
    Later stages see a model of fewer blocks. `report` says which went.
    """

    of = Depth
    measured_words = "how far blocks move the residual stream"

    def check(self, prepared: Prepared) -> None:
        check_depth(prepared)

    def check_data(self, prepared: Prepared) -> None:
        check_folds(prepared)

    def check_training(self, prepared: Prepared) -> None:
        check_samples(prepared)

    def preview(self, prepared: Prepared) -> Prepared:
        return drop_any_blocks(prepared)

    def kept_words(self, prepared: Prepared) -> str | None:
        record, recipe = prepared.facts(DepthRecord), prepared.whole.recipe
        if record is None:
            return None
        return self._kept_beside(prepared, record) if len(recipe.sizing) > 1 else self._kept_alone(prepared, record)

    def _kept_beside(self, prepared: Prepared, record: DepthRecord) -> str:
        """Say which blocks go, beside something else that does."""
        if prepared.foreseen and self.keys.auto:
            return f"how many whole blocks go is measured first; if it were {fewest(record.blocks - len(record.kept))}"
        if not record.gaps:
            return "no whole block goes"
        return (
            f"{len(record.kept)} of {record.blocks} blocks stay" if prepared.foreseen else f"gone: {name_gone(record)}"
        )

    def _kept_alone(self, prepared: Prepared, record: DepthRecord) -> str:
        """Say how many blocks stay if nothing else goes, and which if that is known."""
        size = prepared.whole.recipe.size
        why = "" if size is None else f", for {size.words}"
        if not record.gaps:
            return f"nothing is dropped: the model is within {'its size' if size is None else size.words} as it is"
        if prepared.foreseen:
            what = "blocks stay" if record.part == "block" else f"blocks keep their {record.part}"
            return f"{len(record.kept)} of {record.blocks} {what}{why}: which ones is measured first"
        return f"gone: {name_gone(record)}{why}"

    def widest_fit(self, prepared: Prepared) -> int:
        fits = self.keys.compensation.linear and prepared.whole.live is not None
        return prepared.model.dimension("hidden") if fits else 0

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return drop_blocks(prepared, run)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return {"depth": prepared.facts(DepthRecord)}
