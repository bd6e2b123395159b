"""The work of the stage `hidden`: dimensions of the residual stream go, in a basis that is measured (SliceGPT)."""

from collections.abc import Callable, Sequence
from typing import Any

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.model.model import Model
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.hidden.preview import check_hidden, half_stream, narrow_unmeasured
from ckpt_prune.stages.hidden.records import HiddenRecord
from ckpt_prune.stages.hidden.run import narrow_stream
from ckpt_prune.stages.hidden.show import dimensions_line
from ckpt_prune.stages.shared.extremes import fewest
from ckpt_prune.stages.shared.tokens import calibration_tokens


class HiddenStage(Stage[Hidden]):
    """Narrows the residual stream.

        version: 1
        name: narrower
        hidden: {kind: shared, drop: 64}

    In order: `check` refuses families whose stream cannot be turned. `preview` lays the narrower model out. `run`
    measures the basis, turns the weights into it and cuts. Later stages see a model of that width. `report` has its
    energies.
    """

    of = Hidden
    measured_words = "the residual stream, wherever a block reads it"

    def check(self, prepared: Prepared) -> None:
        check_hidden(prepared)

    def preview(self, prepared: Prepared) -> Prepared:
        return narrow_unmeasured(prepared)

    def kept_words(self, prepared: Prepared) -> str | None:
        record, recipe = prepared.facts(HiddenRecord), prepared.whole.recipe
        if record is None:
            return None
        if recipe.spaces and prepared.foreseen and self.keys.auto:
            gone = fewest(record.dimensions - record.kept)
            return f"how many dimensions of the residual stream go is measured first; if it were {gone}"
        if recipe.spaces or recipe.size is None:
            return f"residual stream: {dimensions_line(record)}"
        if record.kept == record.dimensions:
            return f"nothing is dropped: the model is within {recipe.size.words} as it is"
        return f"residual stream: {dimensions_line(record)}, for {recipe.size.words}"

    def warnings(self, prepared: Prepared) -> list[str]:
        tokens, width = calibration_tokens(prepared), prepared.model.dimension("hidden")
        if prepared.recipe.spaces or tokens >= 2 * width:
            return []
        return [
            f"few calibration tokens: {tokens:,} for {width:,} dimensions of the residual stream, whose principal "
            f"directions are then those of these tokens; use more samples ({2 * width:,} tokens or more)"
        ]

    def halve(self, prepared: Prepared) -> tuple[int, Callable[[Model], Model]]:
        return half_stream(prepared)

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return narrow_stream(prepared, run)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        record = prepared.facts(HiddenRecord)
        idle = prepared.basis is None and not prepared.job.recipe.spaces
        return {"hidden": None if idle else record}
