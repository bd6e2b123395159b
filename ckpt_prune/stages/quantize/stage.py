"""The work of the stage `quantize`: round the linear weights of the blocks."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.job.form import Form
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.step import Step
from ckpt_prune.model.model import Model
from ckpt_prune.stages.quantize.keys import Quantize, QuantizeAlone
from ckpt_prune.stages.quantize.output import check_model
from ckpt_prune.stages.quantize.step import (
    QUANTIZED,
    check_alone,
    check_samples,
    describe_weights,
    lay_out,
    quantize_step,
)
from ckpt_prune.stages.shared.tokens import INPUTS


class QuantizeStage(Stage[Quantize]):
    """Rounds the linear weights of the blocks, behind whatever prunes them.

        version: 1
        name: small-and-rounded
        ratio: 0.2
        spaces: {mlp: {score: rcpu, compensation: {method: ridge}}}
        quantize: {format: int4, group_size: "64"}

    In order: `check` refuses weights that do not divide into groups, `check_data` data that GPTQ cannot use. `step`
    rounds a block behind the rounded ones, and the container says so. `report` has the errors.
    """

    of = Quantize

    def check_source(self, model: Model) -> None:
        """`check` refuses outputs with code of their own, as runtimes of quantised weights do."""

    def check(self, prepared: Prepared) -> None:
        check_model(prepared.model)

    def check_data(self, prepared: Prepared) -> None:
        if self.keys.rounding == "gptq":
            check_samples(prepared)

    @property
    def measured_words(self) -> str | None:
        return INPUTS if self.keys.rounding == "gptq" else None

    def plan_lines(self, prepared: Prepared) -> list[str]:
        return [f"to be rounded to {self.keys.format}, {self.keys.rounding}"]

    def step(self, prepared: Prepared, run: Run) -> Step:
        return quantize_step(self.keys, prepared, run)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return {"quantize": describe_weights(self.keys, prepared, records)}


class QuantizeAloneStage(QuantizeStage):
    """Rounds weights as the command `quantize` does: statistics of the model may have been measured before."""

    of = QuantizeAlone

    def check(self, prepared: Prepared) -> None:
        check_alone(self.keys, prepared)

    def check_data(self, prepared: Prepared) -> None:
        """Statistics are enough."""

    def preview(self, prepared: Prepared) -> Prepared:
        return lay_out(self.keys, prepared)

    def form(self) -> Form:
        return QUANTIZED
