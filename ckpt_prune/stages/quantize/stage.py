"""The stage `quantize`: weights of few bits. The command `quantize` runs it alone."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ckpt_prune.job.recipe import Recipe, StageKeys
from ckpt_prune.job.stage import Stage
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.stages.quantize.scheme import Format

if TYPE_CHECKING:
    from ckpt_prune.job.form import Form
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.job.run import Run
    from ckpt_prune.job.step import Step


Rounding = Literal["nearest", "gptq"]


class Quantize(Stage):
    """Rounding of the linear weights of the blocks."""

    key = "quantize"
    summary = "Store the linear weights of the blocks in 8 or 4 bits."
    doing = "quantised"
    bar = "quantising"
    takes_outputs = True

    format: Format = Field(description="What weights are stored as.")
    group_size: str | None = Field(None, description="Columns that share a scale, or channel.")
    rounding: Rounding = Field("gptq", description="nearest: to the nearest number; gptq: so that outputs stay.")

    def needs_moments(self, recipe: Recipe) -> bool:
        return self.rounding == "gptq"

    def measures_prefix(self, recipe: Recipe) -> bool:
        return self.rounding == "gptq"

    def collects(self, recipe: Recipe) -> set[Collect]:
        return {"gram", "linears"} if self.rounding == "gptq" else set()

    def check(self, prepared: "Prepared") -> None:
        from ckpt_prune.stages.quantize.step import choose_weights

        choose_weights(self, prepared)

    def preview(self, prepared: "Prepared") -> "Prepared":
        from ckpt_prune.stages.quantize.step import lay_out

        return lay_out(self, prepared)

    def step(self, prepared: "Prepared", run: "Run") -> "Step":
        from ckpt_prune.stages.quantize.step import quantize_step

        return quantize_step(self, prepared)

    def form(self) -> "Form":
        from ckpt_prune.stages.quantize.step import QUANTIZED

        return QUANTIZED


class QuantizeRecipe(Recipe):
    """The recipe of the command `quantize`: one stage."""

    kinds: ClassVar[tuple[type[StageKeys], ...]] = (Quantize,)

    quantize: Quantize


def quantize_recipe(format: Format, group_size: str | None, rounding: Rounding) -> QuantizeRecipe:
    """Return the recipe that stores a model's weights in a format; samples are measured behind rounded blocks."""
    stage = {"format": format, "group_size": group_size, "rounding": rounding}
    return QuantizeRecipe.model_validate({"version": 1, "name": "quantize", "target": "sequential", "quantize": stage})
