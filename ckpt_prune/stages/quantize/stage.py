"""The stage `quantize`: weights of few bits. It is the only stage of its job, which the command `quantize` runs."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ckpt_prune.job.recipe import Recipe, StageKeys
from ckpt_prune.job.stage import Stage
from ckpt_prune.stages.quantize.scheme import Format

if TYPE_CHECKING:
    from ckpt_prune.job.form import Form
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.job.run import Run
    from ckpt_prune.job.step import Step


class Quantize(Stage):
    """Rounding of the linear weights of the blocks."""

    key = "quantize"
    summary = "Store the linear weights of the blocks in 8 or 4 bits."
    doing = "quantised"
    bar = "quantising"
    takes_outputs = True

    format: Format = Field(description="What weights are stored as.")
    group_size: str | None = Field(None, description="Columns that share a scale, or channel.")

    def check(self, prepared: "Prepared") -> None:
        from ckpt_prune.stages.quantize.step import choose_weights

        choose_weights(self, prepared)

    def preview(self, prepared: "Prepared") -> "Prepared":
        from ckpt_prune.stages.quantize.step import lay_out

        return lay_out(self, prepared)

    def step(self, prepared: "Prepared", run: "Run") -> "Step":
        from ckpt_prune.stages.quantize.step import QuantizeStep, choose_weights

        return QuantizeStep(choose_weights(self, prepared), prepared)

    def form(self) -> "Form":
        from ckpt_prune.stages.quantize.step import QUANTIZED

        return QUANTIZED


class QuantizeRecipe(Recipe):
    """The recipe of the command `quantize`: one stage."""

    kinds: ClassVar[tuple[type[StageKeys], ...]] = (Quantize,)

    quantize: Quantize


def quantize_recipe(format: Format, group_size: str | None = None) -> QuantizeRecipe:
    """Return the recipe that stores a model's weights in a format."""
    stage = {"format": format, "group_size": group_size}
    return QuantizeRecipe.model_validate({"version": 1, "name": "quantize", "quantize": stage})
