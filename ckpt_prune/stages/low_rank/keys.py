"""The keys of `low_rank`: two thin linear modules in the place of each (SVD-LLM)."""

from collections.abc import Mapping
from math import lcm
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.options.training import Part
from ckpt_prune.recipe.recipe import Recipe, StageKeys


class LowRank(StageKeys):
    """Linear modules of every block as products of two."""

    key = "low_rank"
    goal = "low-rank"
    asks = frozenset({"low rank"})
    doing = "factored"
    summary = "Two thin linears in the place of each, instead of spaces or a mask."
    unplannable = (
        "factors linears, which a plan does not list: `ckpt-prune prune` applies it, with --dry-run to see sizes"
    )
    excludes: ClassVar[Mapping[str, str]] = {
        "spaces": "low_rank factors linears of the dense model: spaces does not go with it",
        "recovery": "low_rank factors linears of the dense model: recovery does not go with it",
    }
    later: ClassVar[Mapping[str, Any]] = {"update": False}

    method: Literal["whitened", "plain"] = Field(
        "whitened",
        description="whitened: the least error of the outputs, by the Grams of the inputs (SVD-LLM); plain: the least "
        "change of the weights, without data.",
    )
    allocation: Literal["uniform", "energy"] = Field(
        "uniform",
        description="uniform: the same share of every weight's parameters, as published; energy: the ranks of least "
        "error, each as a share of its output's energy, for as many parameters in all.",
    )
    only: Part | None = Field(None, description="Factor these linear modules alone. Default: all.")
    multiple_of: int = Field(1, ge=1, description="Round ranks up to a multiple of this.")

    update: bool = Field(
        False,
        description="Then fit the second linear of each again, behind the blocks that are factored already, to what "
        "the dense weight makes of what reaches it (SVD-LLM's closed-form update). It needs target: sequential, and "
        "text or images.",
    )

    def check_recipe(self, recipe: Recipe) -> None:
        for key in ("allocation", "widths", "weigh_by", "layers", "size"):
            if getattr(recipe, key) != Recipe.model_fields[key].default:
                raise ValueError(f"{key} is about units of spaces: it does not go with low_rank")
        if recipe.target == "drift":
            raise ValueError("target drift is for spaces, whose consumers are refitted: say sequential with low_rank")
        if self.update and not (self.whitens and recipe.target == "sequential"):
            raise ValueError("low_rank.update fits to what reaches a linear: say method: whitened, target: sequential")
        if recipe.container not in ("auto", "any", "remote"):
            raise ValueError(f"low_rank needs remote code, which container {recipe.container} rules out")
        if recipe.ratio == 0:
            raise ValueError("low_rank with ratio 0 leaves nothing to do: say which share of the parameters goes")

    def in_multiples_of(self, unit: int) -> Self:
        return self.model_copy(update={"multiple_of": lcm(self.multiple_of, unit)})

    def at_one_ratio(self) -> Self:
        return self.model_copy(update={"allocation": "uniform"})

    def needs_moments(self, recipe: Recipe) -> bool:
        return self.whitens

    def measures_prefix(self, recipe: Recipe) -> bool:
        return self.whitens

    def measures_dense(self, recipe: Recipe) -> bool:
        return self.update or self.decides_widths(recipe)

    def decides_widths(self, recipe: Recipe) -> bool:
        return self.allocation == "energy"

    def needs_own_code(self, recipe: Recipe) -> bool:
        return True

    def collects(self, recipe: Recipe) -> set[Collect]:
        return {"gram", "linears"} if self.whitens else set()

    @property
    def whitens(self) -> bool:
        return self.method == "whitened"
