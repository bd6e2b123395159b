"""Facts to choose a recipe by: what it is for, what data it needs, what loads its output."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from ckpt_prune.recipe.names import Goal
from ckpt_prune.recipe.recipe import Recipe

Data = Literal["text", "images", "statistics"]
Loads = Literal["stock", "stock, else own code", "own code"]

GOALS: dict[Goal, str] = {
    "stock": "Smaller, for the stock classes of transformers",
    "loss": "Smallest loss",
    "vision": "Vision models, and any family without rotary positions",
    "cache": "A smaller cache of keys and values, for families with rotary positions",
    "depth": "Fewer blocks: less latency, loads with stock classes",
    "hidden": "A narrower residual stream",
    "experts": "Fewer experts, for mixtures of them",
    "low-rank": "Two thin linears in the place of each, for any family but mixtures of experts",
    "zeros": "Zeros (masks): shapes stay",
    "recovery": "Recovery: what stays is trained",
    "paper": "Baselines of papers",
}
"""Goal → heading of its group, in the order of the list."""


WANTS: dict[Goal, str] = {
    "stock": "stock classes",
    "loss": "smallest loss",
    "vision": "a smaller vision model",
    "cache": "a smaller KV cache",
    "depth": "less latency",
    "hidden": "a narrower model",
    "experts": "fewer experts",
    "low-rank": "thin linears",
    "zeros": "zeros (masks)",
    "recovery": "training afterwards",
    "paper": "a paper's method",
}
"""Goal → a few words for a table."""


@dataclass(frozen=True)
class Entry:
    """A recipe in a list.

    Attributes:
        goal: what it is for: what it says itself, else what its stages say.
        data: kinds of data that it can measure on, any one of them; empty if nothing is measured.
        calibration: the command that measures statistics for it; None if statistics are not enough.
        loads: what loads its output. stock: a class of transformers; own code: `ckpt_prune.load`, or remote code.
    """

    recipe: Recipe
    goal: Goal
    data: tuple[Data, ...]
    calibration: str | None
    loads: Loads

    @classmethod
    def of(cls, recipe: Recipe) -> "Entry":
        data = _data(recipe.at_its_size)  # whole blocks for a size that it does not say itself need more
        return cls(recipe, _goal(recipe), data, recipe.calibration if "statistics" in data else None, _loads(recipe))

    @property
    def needs(self) -> str:
        """The kinds of data in a few words; any stands for all of them."""
        if self.data == get_args(Data):
            return "any"
        return " or ".join(filter(None, [", ".join(self.data[:-1]), *self.data[-1:]])) or "none"


def group_recipes(recipes: Iterable[Recipe]) -> dict[Goal, list[Entry]]:
    """Return recipes by what they are for, in the order of `GOALS`; groups without a recipe are left out."""
    entries = [Entry.of(recipe) for recipe in recipes]
    groups = {goal: [entry for entry in entries if entry.goal == goal] for goal in GOALS}
    return {goal: group for goal, group in groups.items() if group}


def _goal(recipe: Recipe) -> Goal:
    if recipe.goal is not None:
        return recipe.goal
    stages = sorted(recipe.stages, key=lambda keys: not keys.trains)
    return next((keys.goal for keys in stages if keys.goal is not None), "paper")


def _data(recipe: Recipe) -> tuple[Data, ...]:
    samples = any(stage.needs_samples(recipe) for stage in recipe.stages)
    if not (recipe.needs_moments or samples):
        return ()
    text = any(stage.needs_text(recipe) for stage in recipe.stages)
    insufficient = {"images": text, "statistics": samples}
    return tuple(data for data in get_args(Data) if not insufficient.get(data))


def _loads(recipe: Recipe) -> Loads:
    if recipe.container == "remote" or any(stage.needs_own_code(recipe) for stage in recipe.stages):
        return "own code"
    return "stock, else own code" if recipe.container == "any" else "stock"
