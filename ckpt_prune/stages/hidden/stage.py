"""The work of the stage `hidden`: dimensions of the residual stream go, in a basis that is measured (SliceGPT)."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.hidden.preview import check_hidden
from ckpt_prune.stages.hidden.run import narrow_stream
from ckpt_prune.stages.joint_counts.placeholders import narrow_unmeasured


class HiddenStage(Stage[Hidden]):
    """Narrows the residual stream."""

    of = Hidden

    def check(self, prepared: Prepared) -> None:
        check_hidden(prepared)

    def preview(self, prepared: Prepared) -> Prepared:
        return narrow_unmeasured(prepared)

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return narrow_stream(prepared, run)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        record = prepared.hidden
        idle = prepared.basis is None and not prepared.job.recipe.spaces
        return {"hidden": None if idle else record}
