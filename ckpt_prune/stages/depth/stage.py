"""The work of the stage `depth`: whole blocks go, before anything else is done to those that stay."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.depth.preview import check_depth, check_samples
from ckpt_prune.stages.depth.run import drop_blocks
from ckpt_prune.stages.joint_counts.placeholders import drop_any_blocks
from ckpt_prune.stages.spaces.checks import check_folds


class DepthStage(Stage[Depth]):
    """Drops whole blocks, or the attention or mlp of some."""

    of = Depth

    def check(self, prepared: Prepared) -> None:
        check_depth(prepared)

    def check_data(self, prepared: Prepared) -> None:
        check_folds(prepared)

    def check_training(self, prepared: Prepared) -> None:
        check_samples(prepared)

    def preview(self, prepared: Prepared) -> Prepared:
        return drop_any_blocks(prepared)

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return drop_blocks(prepared, run)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return {"depth": prepared.depth}
